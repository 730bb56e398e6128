"""Ten scripts at once on one pool: what they share is computed once, and nobody waits for another's whole list.

`python examples/ten_scripts.py` starts a pool and ten processes of this file; each asks for prompts of its own and for
some that all ask for. `python examples/ten_scripts.py URL NUMBER` is one such script, on any pool.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import lenspool.sync
from lenspool.sync import Client

SCRIPTS = 10
SHARED = [f"The number {i} is followed by the number" for i in range(6)]
HOOK = "resid_post.*"


def script(url: str, number: int) -> dict[str, int]:
    """What one script does: capture its prompts, and count."""
    prompts = [*SHARED, *(f"Script {number} asks about the year {1900 + 10 * i}" for i in range(6))]
    with Client(url) as client:
        results = list(client.map(prompts, HOOK, positions="last"))
    return {
        "answers": len(results),
        "computed": sum(result.provenance["computed_rows"] > 0 for result in results),
        "reused": sum(result.provenance["computed_rows"] == 0 for result in results),
    }


def run(url: str, scripts: int = SCRIPTS) -> Sequence[dict[str, int]]:
    """Start the scripts together, and wait for what they say."""
    command = [sys.executable, __file__, url]
    processes = [subprocess.Popen([*command, str(i)], stdout=subprocess.PIPE, text=True) for i in range(scripts)]
    said = [process.communicate()[0] for process in processes]
    return [json.loads(line) for line in said]


def main(folder: Path = Path(".demo/store")) -> None:
    from lenspool_worker.demo_model import default_folder, prepare

    with lenspool.sync.connect_local(prepare(default_folder()), store=folder) as client:
        for number, counts in enumerate(run(client.url)):
            print(f"script {number}: {counts}")


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(script(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
