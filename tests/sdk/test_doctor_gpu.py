"""What the doctor concludes from what a machine says of its GPUs."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from lenspool.doctor.gpu import Machine, check_gpu, gpu_findings

ONE = "NVIDIA H200, 143771, 143100, 580.65.06, 9.0\n"


@pytest.mark.parametrize(
    ("machine", "state", "words"),
    [
        (Machine(None), "note", "on the CPU"),
        (Machine("", "couldn't communicate with the NVIDIA driver"), "error", "couldn't communicate"),
        (Machine(""), "error", "names no GPU"),
        (Machine(ONE, torch_cuda="13.0", driver_cuda="13.0"), "ok", "140 of 140 GiB free, driver 580.65.06"),
        (Machine(ONE, torch_cuda="12.9", driver_cuda="12.4"), "ok", "H200"),  # minor versions are compatible
        (Machine(ONE, torch_cuda="13.0", driver_cuda="12.8"), "error", "CUDA 13.0, and the driver serves 12.8"),
        (Machine(ONE, torch_cuda="", driver_cuda="13.0"), "error", "built without CUDA"),
        (Machine(ONE, torch_cuda="", cpu_engine=True), "warning", "for CPUs"),
        (Machine(ONE, visible=""), "warning", "see none of them"),
        (Machine(ONE, visible="-1"), "warning", "see none of them"),
        (Machine(ONE * 2, visible="1"), "note", "uses GPU 1"),
        (Machine("NVIDIA H200, 143771, 90000, 580.65.06, 9.0"), "warning", "gpu_memory_utilization"),
        (Machine("NVIDIA GB10, [N/A], [N/A], 580.65.06, 12.1"), "ok", "does not tell its memory"),
        (Machine("Tesla T4, 15360, 15000, 580.65.06, 7.5"), "note", "float16"),
    ],
)
def test_what_it_concludes(machine: Machine, state: str, words: str) -> None:
    found = gpu_findings(machine)
    order = ["ok", "note", "warning", "error"]
    worst = max(found, key=lambda finding: order.index(finding.state))
    assert worst.state == state and words in f"{worst.said} {worst.advice}"


def test_what_it_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a program of that name that answers as the real one does."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"""#!/bin/sh
case "$*" in
  *query-gpu*) printf '%s' '{ONE}' ;;
  '') echo '| NVIDIA-SMI 580.65.06   Driver Version: 580.65.06   CUDA Version: 1.0   |' ;;
esac
""")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert check_gpu()[0].said.startswith("NVIDIA H200, 140 of 140 GiB free")
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    (found,) = check_gpu()
    assert found.state == "error" and "version mismatch" in found.said
