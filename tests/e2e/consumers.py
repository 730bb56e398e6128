"""What other libraries make of a dataset, in a process of its own: they want versions of their own (`make consumers`).

`python -m tests.e2e.consumers REDIS STORE FOLDER PROMPT` reads the dataset `feeds` of the store, and prints JSON.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch

import lenspool.sync
from lenspool import Dataset
from lenspool.feeds import ActivationBuffer, encoder, save_latents, save_sae_lens

HOOK = "blocks.7.hook_resid_post"
FEATURES = 96


def trained_by_sae_lens(dataset: Dataset, folder: Path) -> dict[str, Any]:
    """Ten steps on the export, read by SAELens's own store."""
    from sae_lens import StandardTrainingSAE, StandardTrainingSAEConfig
    from sae_lens.config import SAETrainerConfig
    from sae_lens.training.activations_store import ActivationsStore
    from sae_lens.training.sae_trainer import SAETrainer

    counts = save_sae_lens(dataset, HOOK, folder / "cached")
    store = ActivationsStore(
        model=None,  # type: ignore[arg-type]  # what is cached needs none
        dataset=None,
        streaming=False,
        hook_name=HOOK,
        hook_head_index=None,
        context_size=32,
        d_in=dataset.width(HOOK),
        n_batches_in_buffer=4,
        total_training_tokens=640,
        store_batch_size_prompts=2,
        train_batch_size_tokens=64,
        prepend_bos=False,
        normalize_activations="none",
        device=torch.device("cpu"),
        dtype="float32",
        cached_activations_path=str(folder / "cached"),
    )
    raw, tokens = store.get_raw_llm_batch()
    assert tokens is not None
    same = all(
        np.array_equal(raw[32 * i : 32 * i + 32].numpy(), dataset.matrix(i, HOOK).astype(np.float32))
        and tokens[32 * i : 32 * i + 32].tolist() == dataset.token_ids(i).tolist()
        for i in range(2)
    )
    sae = StandardTrainingSAE(StandardTrainingSAEConfig(d_in=dataset.width(HOOK), d_sae=FEATURES))
    before = sae.W_enc.detach().clone()
    config = SAETrainerConfig(total_training_samples=640, train_batch_size_samples=64, lr=1e-3, lr_end=1e-3)
    trainer = SAETrainer(config, sae, store.get_data_loader())
    trainer.fit()
    moved = float((sae.W_enc - before).abs().max())
    return {"steps": trainer.n_training_steps, "moved": moved, "same": same, "counts": counts}


def encoders_of_sae_lens(client: lenspool.sync.Client, folder: Path, prompt: str) -> dict[str, float]:
    """SAEs that SAELens saved and loaded: features of the pool against its own, as relative distances."""
    from sae_lens import SAE, JumpReLUSAE, JumpReLUSAEConfig, StandardSAE, StandardSAEConfig, TopKSAE, TopKSAEConfig
    from sae_lens.saes.sae import SAEMetadata

    rows = client.capture(prompt, HOOK)
    width, metadata = rows[HOOK].shape[1], SAEMetadata(hook_name=HOOK)
    made = {
        "standard": StandardSAE(StandardSAEConfig(width, FEATURES, metadata=metadata)),
        "topk": TopKSAE(TopKSAEConfig(width, FEATURES, k=8, rescale_acts_by_decoder_norm=True, metadata=metadata)),
        "jumprelu": JumpReLUSAE(JumpReLUSAEConfig(width, FEATURES, apply_b_dec_to_input=False, metadata=metadata)),
    }
    torch.manual_seed(0)
    out = {}
    for name, fresh in made.items():
        for parameter in fresh.parameters():
            parameter.data = torch.randn_like(parameter) * 0.1 + (1.0 if parameter.ndim == 1 else 0.0)
        fresh.save_model(folder / name)
        sae = SAE.load_from_disk(folder / name)
        asked = encoder(sae)
        found = client.capture(prompt, asked)[asked]
        expected = sae.encode(rows.torch(HOOK).float()).detach().numpy()
        dense = np.zeros_like(expected)
        for row, (indices, values) in enumerate(zip(found.indices, found.values, strict=True)):
            dense[row, indices[indices >= 0]] = values[indices >= 0]
        assert 0 < np.count_nonzero(expected) < expected.size
        out[name] = float(np.linalg.norm(dense - expected) / np.linalg.norm(expected))
    return out


def trained_by_dictionary_learning(dataset: Dataset) -> dict[str, Any]:
    """Ten steps of its trainer on our buffer."""
    from dictionary_learning import AutoEncoder
    from dictionary_learning.trainers.standard import StandardTrainer
    from dictionary_learning.training import trainSAE

    buffer = ActivationBuffer(dataset, HOOK, out_batch_size=64, seed=0)
    losses: list[float] = []
    moved: list[float] = []

    class Watched(StandardTrainer):
        def update(self, step: int, activations: torch.Tensor) -> None:
            assert activations.shape == (64, buffer.d_submodule)
            losses.append(float(self.loss(activations, step=step).detach()))
            before = self.ae.encoder.weight.detach().clone()
            super().update(step, activations)
            moved.append(float((self.ae.encoder.weight.detach() - before).abs().max()))

    config = {
        "trainer": Watched, "dict_class": AutoEncoder, "activation_dim": buffer.d_submodule, "dict_size": FEATURES,
        "lr": 1e-3, "l1_penalty": 1e-2, "warmup_steps": 2, "sparsity_warmup_steps": 2, "decay_start": 9, "steps": 10,
        "layer": 7, "lm_name": "SmolLM2", "device": "cpu", "resample_steps": None,
    }  # fmt: skip
    trainSAE(buffer, [config], steps=10, device="cpu")
    return {"losses": losses, "moved": moved, "config": buffer.config}


def latents_of_delphi(dataset: Dataset, folder: Path, tokenizer: str) -> dict[str, Any]:
    """Its loader's records against the features that were captured."""
    from delphi.config import ConstructorConfig, SamplerConfig
    from delphi.latents import LatentDataset

    counts = save_latents(dataset, folder / "latents", n_splits=3, model_name=tokenizer)
    loaded = LatentDataset(folder / "latents", SamplerConfig(), ConstructorConfig(example_ctx_len=32, min_examples=1))
    (name,) = (hook for hook in dataset.hooks if "|sae(" in hook)
    expected: dict[int, dict[tuple[int, int], float]] = {}
    whole = [i for i in range(len(dataset)) if len(dataset.token_ids(i)) == 32]
    for context, number in enumerate(whole):
        found = dataset[number][name]
        for position, slot in zip(*np.nonzero(found.values > 1e-5), strict=True):
            feature = expected.setdefault(int(found.indices[position, slot]), {})
            feature[context, int(position)] = float(np.float16(found.values[position, slot]))
    got: dict[int, dict[tuple[int, int], float]] = {}
    for buffer in loaded.buffers:
        for latent in buffer:
            places, values = latent.activation_data.locations, latent.activation_data.activations
            got[latent.latent.latent_index] = {
                (int(p[0]), int(p[1])): float(v) for p, v in zip(places, values, strict=True)
            }
    records = [record for record in loaded if record is not None and record.train]
    return {
        "same": got == expected,
        "latents": len(got),
        "counts": counts,
        "tokens": loaded.tokens is not None and loaded.tokens[0].tolist() == dataset.token_ids(whole[0]).tolist(),
        "records": len(records),
    }


def main(redis: str, store: str, folder: Path, prompt: str, tokenizer: str) -> None:
    with lenspool.sync.Client(redis, store=store) as client:
        dataset = client.open_dataset("feeds")
        answer = {
            "sae_lens": trained_by_sae_lens(dataset, folder),
            "encoders": encoders_of_sae_lens(client, folder, prompt),
            "dictionary_learning": trained_by_dictionary_learning(dataset),
            "delphi": latents_of_delphi(dataset, folder, tokenizer),
        }
    print(json.dumps(answer))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), *sys.argv[4:])
