"""Toy multimodal family: Qwen3 with a tower small enough to be read at a glance."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from anygauge.plugins import load_plugins
from anygauge.testing.tiny import tiny_qwen3
from anygauge_hooks import hookimpl
from anygauge_hooks.media import Content, Media, MediaSpec, TowerSpec
from anygauge_hooks.megatron import WeightRule, megatron_model, with_megatron
from anygauge_hooks.models import ModelSpec
from anygauge_tests.batches import TrainSample, sample_of

ARCHITECTURE, HIDDEN, VOCAB, HOLDER, PATCH, LEVELS = "ToyForConditionalGeneration", 64, 64, 63, 2, 2


class ToyTower(nn.Module):
    """A feature of each patch, and one of each level."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3 * PATCH * PATCH, 16)
        self.norm = nn.LayerNorm(16)
        self.outer = nn.Linear(16, HIDDEN)
        self.deep = nn.ModuleList(nn.Linear(16, HIDDEN) for _ in range(LEVELS))
        self.passes = 0

    def forward(self, patches: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return features and those of the levels, ``[N, H]`` each."""
        self.passes += 1
        x = self.norm(self.inner(patches).tanh())
        return self.outer(x), [each(x) for each in self.deep]


def inputs(hf: Mapping[str, Any], contents: Sequence[Content], device: torch.device) -> dict[str, Any]:
    """Return pixels by patch."""
    images = [torch.from_numpy(np.array(each.data)).to(device).float() / 127.5 - 1 for each in contents]
    cut = [x.unfold(0, PATCH, PATCH).unfold(1, PATCH, PATCH).reshape(-1, 3 * PATCH * PATCH) for x in images]
    return {"patches": torch.cat(cut), "lengths": tuple(len(each) for each in cut)}


def positions(hf: Mapping[str, Any], length: int, media: Sequence[Media]) -> Any:
    """Return positions that go on by one for each placeholder, but for height and width."""
    axes = np.broadcast_to(np.arange(length), (3, length)).copy()
    for each in media:
        ((start, count),) = each.spans
        _, _, width = each.grid
        axes[0, start : start + count] = start
        axes[1, start : start + count] = start + np.arange(count) // width
        axes[2, start : start + count] = start + np.arange(count) % width
    return axes


TOWER = TowerSpec(
    name="visual",
    kinds=frozenset({"image"}),
    build=lambda hf: ToyTower(),
    inputs=inputs,
    outputs=lambda found: found,
    blank=lambda hf: Content("image", np.zeros((PATCH, PATCH, 3), dtype=np.uint8)),
    levels=lambda hf: LEVELS,
    hf_prefixes=("visual.",),
)


class Package:
    """A package that registers the family."""

    @hookimpl
    def register_models(self) -> list[ModelSpec]:
        """Register it."""
        base: ModelSpec = load_plugins().get("register_models", "qwen3")
        model = megatron_model(base)

        def weight_rules(hf: Mapping[str, Any]) -> list[WeightRule]:
            own = (WeightRule(canonical=name, hf=(name,)) for name in names)
            return [*model.weight_rules(hf), *own]

        names = [f"visual.{name}" for name in ToyTower().state_dict()]
        media = MediaSpec(
            make_processor=lambda path, hf: None,  # type: ignore[arg-type, return-value]
            towers=lambda hf: [TOWER],
            positions=positions,
            flops=lambda hf, media: 1e4 * media.num_tokens,
            forbidden=lambda hf: (HOLDER,),
        )
        return [
            replace(
                with_megatron(base, replace(model, weight_rules=weight_rules)),
                name="toy",
                architectures=(ARCHITECTURE,),
                media=media,
            )
        ]


def toy_model(directory: Path, **options: Any) -> Path:
    """Write a model of the family."""
    path = tiny_qwen3(directory, vocab_size=VOCAB, head_dim=32, init_std=0.2, layers=3, **options)
    hf = json.loads((path / "config.json").read_text())
    hf["architectures"] = [ARCHITECTURE]
    hf["rope_parameters"] |= {"mrope_section": [6, 5, 5], "mrope_interleaved": True}
    (path / "config.json").write_text(json.dumps(hf))
    torch.manual_seed(0)
    weights = load_file(path / "model.safetensors")
    weights |= {f"visual.{name}": tensor for name, tensor in ToyTower().state_dict().items()}
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


class Store(dict[str, Content]):
    """Contents by key, as :class:`anygauge_hooks.media.MediaStore` has them."""

    def has(self, key: str) -> bool:
        """Return whether it is there."""
        return key in self

    def get(self, key: str) -> Content:  # type: ignore[override]
        """Return it."""
        return self[key]


def image(store: Store, height: int, width: int, seed: int) -> Media:
    """Draw an image of so many patches."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height * PATCH, width * PATCH, 3), dtype=np.uint8)
    key = f"{height}x{width}-{seed}"
    store[key] = Content("image", pixels)
    return Media("image", key, ((0, height * width),), (1, height, width))


def sample(parts: Iterable[int | Media], response: int, seed: int = 0) -> TrainSample:
    """Return a sample of so many tokens of text, or a medium, one after another."""
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    media: list[Media] = []
    for part in parts:
        if isinstance(part, int):
            tokens += torch.randint(0, HOLDER, (part,), generator=generator).tolist()
        else:
            media.append(part.moved(len(tokens)))
            tokens += [HOLDER] * part.num_tokens
    return sample_of(tokens, response)._replace(media=tuple(media))
