"""How many sequences fit on a card: arithmetic in bytes, which refuses what it cannot describe."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from labcore.blocks import blocks_needed

#: Bytes of a number in a cache. Left out: scales beside fp8 and int8. Built in: ch11
NUMBER_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "fp8": 1, "int8": 1}
#: Families that keep all keys and values in layers all alike, each compared with the cache that
#: transformers 5.24 makes for it. Only the first three may leave out how many heads. Built in: ch11
PLAIN = "gpt2 opt llama mistral mixtral phi3 granite olmo2 qwen2 qwen2_moe qwen3 qwen3_moe".split()
#: Keys that tell of another kind of cache, whatever the family. Built in: ch11
UNLIKE = ("is_encoder_decoder", "kv_lora_rank", "sliding_window", "mamba_d_state")


class UnsupportedConfig(ValueError):
    """A config that says too little, or describes another kind of cache. Built in: ch11"""


@dataclass(frozen=True)
class KVShape:
    """What a model keeps of a token: keys and values of some heads in each layer. Built in: ch11"""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    bytes_per_number: int

    def __post_init__(self) -> None:
        if any(type(number) is not int or number < 1 for number in vars(self).values()):
            raise ValueError(f"a shape is whole numbers above 0, got {self}")

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers. Source: Kwon et al. 2023, section 3."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.bytes_per_number


def _whole(config, *names, default=None):
    """The first of the names that the config gives: a whole number above 0."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if type(value) is not int or value < 1:
        raise UnsupportedConfig(f"{' or '.join(names)} is {value!r}, not a whole number above 0")
    return value


def read_kv_shape(source: str | Path | Mapping, dtype: str | None = None) -> KVShape:
    """The shape in a Hugging Face config.json, by its path or as a mapping. Built in: ch11

    `dtype` is for a cache whose numbers are not the model's, such as fp8. Raises UnsupportedConfig,
    with the key, for what is missing, unlike, or of a family not in PLAIN.
    """
    config = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    for key in UNLIKE:
        if config.get(key) and config.get(f"use_{key}") is not False:
            raise UnsupportedConfig(f"{key} is {config[key]}: another kind of cache")
    if kinds := {*(config.get("layer_types") or ())} - {"full_attention"}:
        raise UnsupportedConfig(f"layer_types has {', '.join(sorted(kinds))}")
    if (family := config.get("model_type")) not in PLAIN:
        raise UnsupportedConfig(f"model_type is {family}, none of {', '.join(PLAIN)}")
    width = _whole(config, "hidden_size", "n_embd")
    heads = _whole(config, "num_attention_heads", "n_head")
    kv_heads = _whole(config, "num_key_value_heads", default=heads if family in PLAIN[:3] else None)
    head_dim = _whole(config, "head_dim", default=None if "qwen3" in family else width // heads)
    if heads % kv_heads or (width % heads and not config.get("head_dim")):
        raise UnsupportedConfig(f"hidden_size {width}, {heads} heads, {kv_heads} key/value heads")
    if not dtype and (config.get("quantization_config") or {}).get("kv_cache_scheme"):
        raise UnsupportedConfig("kv_cache_scheme has a type for the cache: give dtype")
    name = str(dtype or config.get("dtype") or config.get("torch_dtype")).removeprefix("torch.")
    if name not in NUMBER_BYTES:
        raise UnsupportedConfig(f"dtype is {name}: give one of {', '.join(NUMBER_BYTES)}")
    layers = _whole(config, "num_hidden_layers", "n_layer")
    return KVShape(layers, kv_heads, head_dim, NUMBER_BYTES[name])


@dataclass(frozen=True)
class Plan:
    """A model on a card, and the blocks that fit beside it. Sizes in bytes. Built in: ch11

    Weights, activations at their peak (and whatever else the server holds) and blocks share
    `share` of `memory`, as under vLLM's gpu_memory_utilization; several cards and other programs
    are left out. Raises ValueError if no block fits.
    """

    shape: KVShape
    memory: int
    weights: int
    activations: int = 0
    share: float = 1.0
    block_size: int = 16

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1 <= self.block_size or min(self.weights, self.activations) < 0:
            raise ValueError(f"a share is above 0 and at most 1, sizes not negative, got {self}")
        if not self.num_blocks >= 1:  # or no number at all
            raise ValueError(
                f"no block fits: {self.share} of {self.memory:,} bytes, less {self.weights:,} of "
                f"weights and {self.activations:,} of activations, is {self.kv_bytes:,}"
            )

    @property
    def kv_bytes(self) -> int:
        """What is left for keys and values."""
        return int(self.share * self.memory) - self.weights - self.activations

    @property
    def num_blocks(self) -> int:
        """Whole blocks."""
        return self.kv_bytes // (self.block_size * self.shape.token_bytes)

    def sequences(self, tokens: int) -> int:
        """How many fit of `tokens` tokens each, or with room for so many reserved."""
        if tokens < 1:
            raise ValueError(f"a sequence has at least 1 token, got {tokens}")
        return self.num_blocks // blocks_needed(tokens, self.block_size)

    def sequences_of_mean(self, tokens: int) -> int:
        """How many fit of all lengths, `tokens` the mean, their last blocks half empty (ch07)."""
        if tokens < 1:
            raise ValueError(f"a sequence has at least 1 token, got {tokens}")
        return 2 * self.num_blocks * self.block_size // (2 * tokens + self.block_size - 1)
