"""GPT-2 in plain torch, without a cache. Any GPT-2 checkpoint's weights fit in by name."""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors import SafetensorError
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch import Tensor, nn

from labcore.attention import causal_attention


class UnsupportedModel(ValueError):
    """A checkpoint that is not a GPT-2, or one with an option this GPT-2 lacks.  Given."""


class ModelNotFound(OSError):
    """A model that is neither in a folder, nor in a local cache, nor in reach of a hub.  Given."""


@dataclass(frozen=True)
class GPT2Config:
    """The shape of a GPT-2, in the names of Hugging Face's config.json.  Built in: ch04"""

    n_layer: int = 12
    n_head: int = 12
    n_embd: int = 768
    vocab_size: int = 50_257
    n_positions: int = 1_024
    layer_norm_epsilon: float = 1e-5
    eos_token_id: int | None = None

    @property
    def head_dim(self) -> int:
        """Width of one head: all heads together are as wide as the model."""
        return self.n_embd // self.n_head


class Affine(nn.Module):
    """x @ weight + bias; GPT-2's files hold weights as [inputs, outputs].  Built in: ch04"""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(inputs, outputs))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """[..., inputs] to [..., outputs]."""
        return F.linear(x, self.weight.T, self.bias)


class Layer(nn.Module):
    """One layer: attention, then a network on each position; both add to x.  Built in: ch04"""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        width, epsilon = config.n_embd, config.layer_norm_epsilon
        self.n_head = config.n_head
        self.ln_1 = nn.LayerNorm(width, epsilon)
        self.ln_2 = nn.LayerNorm(width, epsilon)
        attn = {"c_attn": Affine(width, 3 * width), "c_proj": Affine(width, width)}
        mlp = {"c_fc": Affine(width, 4 * width), "c_proj": Affine(4 * width, width)}
        self.attn, self.mlp = nn.ModuleDict(attn), nn.ModuleDict(mlp)

    def forward(self, x: Tensor, attend: Callable) -> Tensor:
        """[batch, n, n_embd] to the same, with attend(q, k, v) on [batch, n, n_head, head_dim]."""
        qkv = self.attn["c_attn"](self.ln_1(x))  # [batch, n, 3 * n_embd]
        q, k, v = qkv.unflatten(-1, (3, self.n_head, -1)).unbind(-3)  # [batch, n, n_head, head_dim]
        mixed = attend(q, k, v).flatten(-2)  # [batch, n, n_embd], the heads side by side
        x = x + self.attn["c_proj"](mixed)
        wide = F.gelu(self.mlp["c_fc"](self.ln_2(x)), approximate="tanh")  # [batch, n, 4 * n_embd]
        return x + self.mlp["c_proj"](wide)


class GPT2(nn.Module):
    """Embeddings, layers, and a head that is the token embedding again.  Built in: ch04"""

    def __init__(self, config: GPT2Config) -> None:
        super().__init__()
        self.config = config
        embedding = nn.Embedding.from_pretrained  # random numbers on "meta" take 1.4 seconds
        self.wte = embedding(torch.empty(config.vocab_size, config.n_embd))
        self.wpe = embedding(torch.empty(config.n_positions, config.n_embd))
        self.h = nn.ModuleList(Layer(config) for _ in range(config.n_layer))
        self.ln_f = nn.LayerNorm(config.n_embd, config.layer_norm_epsilon)

    def hidden(self, tokens: Tensor, positions: Tensor, attend: Callable) -> Tensor:
        """Token ids at positions, both [batch, n], to [batch, n, n_embd].

        Each layer calls attend(layer, q, k, v) once; all are [batch, n, n_head, head_dim].
        """
        x = self.wte(tokens) + self.wpe(positions)  # [batch, n, n_embd]
        for index, layer in enumerate(self.h):
            x = layer(x, partial(attend, index))
        return self.ln_f(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., n_embd] to [..., vocab_size]."""
        return hidden @ self.wte.weight.T

    def forward(self, tokens: Tensor) -> Tensor:
        """Everything anew, without a cache: [batch, n] to [batch, n, vocab_size]."""
        positions = torch.arange(tokens.shape[1], device=tokens.device).expand_as(tokens)
        hidden = self.hidden(tokens, positions, lambda layer, *qkv: causal_attention(*qkv))
        return self.logits(hidden)


def random_gpt2(config: GPT2Config, seed: int = 0) -> GPT2:
    """A GPT-2 with random weights, seeded: for timings and for tests.  Given."""
    generator = torch.Generator().manual_seed(seed)
    model = _without_weights(config).to_empty(device="cpu")
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.zero_()
        elif "ln_" in name:
            parameter.fill_(1.0)
        else:
            parameter.normal_(std=0.02, generator=generator)
    return model


def find_model(name: str | None = None) -> str:
    """The path of a folder, or a name on the Hugging Face hub. "tiny" is in this package.

    None takes LABCORE_MODEL from the environment, else "tiny".  Given.
    """
    name = name or os.environ.get("LABCORE_MODEL") or "tiny"
    return str(Path(__file__).parent / "tiny" if name == "tiny" else Path(name).expanduser())


def load_gpt2(
    name: str | None = None, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> tuple[GPT2, Tokenizer]:
    """A GPT-2 with its weights, and its tokenizer; `name` as in `find_model`.

    No pickle is opened. Raises ModelNotFound and UnsupportedModel.  Given.
    """
    name = find_model(name)
    folder = Path(name)
    if folder.is_absolute() and not folder.is_dir():
        raise ModelNotFound(f"no folder {folder}")
    files = ("config.json", "model.safetensors", "tokenizer.json")
    paths = [folder / file if folder.is_dir() else _from_hub(name, file) for file in files]
    for path in paths:
        if not path.is_file():
            raise ModelNotFound(f"{name}: {path.name} is missing; a model is {', '.join(files)}")
    try:
        config, stored = read_config(json.loads(paths[0].read_text())), load_file(paths[1])
    except (json.JSONDecodeError, SafetensorError) as error:
        raise UnsupportedModel(f"{name}: a file that cannot be read: {error}") from None
    weights = {
        key.removeprefix("transformer."): tensor.to(device, dtype)
        for key, tensor in stored.items()
        if key != "lm_head.weight" and not key.endswith((".attn.bias", ".attn.masked_bias"))
    }  # left out: the head, tied to wte, and the causal masks that old files hold
    model = _without_weights(config)
    try:
        model.load_state_dict(weights, assign=True)
    except RuntimeError as error:
        raise UnsupportedModel(f"{name}: weights unlike its config: {error}") from None
    return model, Tokenizer.from_file(str(paths[2]))


def read_config(raw: dict) -> GPT2Config:
    """The shape in a config.json. Raises UnsupportedModel for what is not here.  Given."""
    if raw.get("model_type") != "gpt2":
        raise UnsupportedModel(f"this is a {raw.get('model_type')!r}, not a GPT-2")
    config = GPT2Config(**{f.name: raw[f.name] for f in fields(GPT2Config) if f.name in raw})
    for field in ("n_layer", "n_head", "n_embd", "vocab_size", "n_positions"):
        number = getattr(config, field)
        if type(number) is not int or number < 1:
            raise UnsupportedModel(f"{field} is {number!r}, not a whole number above 0")
    if not isinstance(config.eos_token_id, int | None):
        raise UnsupportedModel(f"eos_token_id is {config.eos_token_id!r}, supported: one, or none")
    supported = {
        "activation_function": ("gelu_new", "gelu_pytorch_tanh"),  # two names of one function
        "n_inner": (None, 4 * config.n_embd),
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "tie_word_embeddings": (True,),
        "add_cross_attention": (False,),
        "quantization_config": (None,),
    }
    for option, values in supported.items():
        if raw.get(option, values[0]) not in values:
            raise UnsupportedModel(f"{option} is {raw[option]!r}, supported: {values}")
    if config.n_embd % config.n_head:
        raise UnsupportedModel(f"n_embd {config.n_embd} is no multiple of n_head {config.n_head}")
    return config


def _without_weights(config: GPT2Config) -> GPT2:
    """A GPT-2 of shapes alone, on the device that holds nothing."""
    with torch.device("meta"):
        return GPT2(config).requires_grad_(False)


def _from_hub(name: str, file: str) -> Path:
    """A file of a model on the hub, from the local cache where it is there."""
    from transformers.utils import cached_file

    try:
        return Path(cached_file(name, file))
    except OSError as error:
        raise ModelNotFound(
            f"{name!r} is no folder, and its {file} is neither in the local cache nor in reach: "
            f'"tiny" needs no network. ({error})'
        ) from None
