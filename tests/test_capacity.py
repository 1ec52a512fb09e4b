"""Bytes a token, sequences a card, and the configs that this arithmetic must refuse."""

import json
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from labcore.blocks import blocks_needed
from labcore.capacity import KVShape, Plan, UnsupportedConfig, read_kv_shape

GIB = 2**30
SEVEN_B = KVShape(num_layers=32, num_kv_heads=32, head_dim=128, bytes_per_number=2)
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768}
LLAMA = {  # Llama-3.1-8B, from its config.json
    "model_type": "llama", "hidden_size": 4_096, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "torch_dtype": "bfloat16",
}  # fmt: skip
QWEN = {  # Qwen2.5-7B: it names a window and does not use it
    "model_type": "qwen2", "hidden_size": 3_584, "num_hidden_layers": 28,
    "num_attention_heads": 28, "num_key_value_heads": 4, "sliding_window": 131_072,
    "max_window_layers": 28, "use_sliding_window": False, "torch_dtype": "bfloat16",
}  # fmt: skip


# Shapes and bytes.


def test_gpt2_small_in_float32_keeps_73728_bytes_a_token_and_72_mib_for_1024():
    """Source: vllm-project/vllm #22291, where the figure was off by 8: bits for bytes."""
    shape = read_kv_shape(GPT2, "float32")
    assert shape == KVShape(12, 12, 64, 4)
    assert shape.token_bytes == 73_728
    assert 1_024 * shape.token_bytes == 72 * 2**20


def test_a_7b_model_fits_20_times_in_10_gib_reserved_and_54_times_in_blocks():
    assert SEVEN_B.token_bytes == 524_288
    assert 1_024 * SEVEN_B.token_bytes == 512 * 2**20
    plan = Plan(SEVEN_B, memory=10 * GIB, weights=0)
    assert plan.sequences(1_024) == 20
    assert plan.sequences_of_mean(371) == 54
    assert int(Fraction("0.98") * plan.kv_bytes / (371 * SEVEN_B.token_bytes)) == 54


def test_8_key_value_heads_instead_of_32_make_room_for_four_times_as_many():
    grouped = Plan(KVShape(32, 8, 128, 2), memory=10 * GIB, weights=0)
    assert grouped.shape.token_bytes == 131_072
    assert grouped.sequences(1_024) == 80
    assert grouped.sequences_of_mean(371) == 216


def test_12_gib_hold_the_slots_of_opt_13b_that_the_paper_prints_as_15_7k():
    """Source: Kwon et al. 2023, table 1: its 12 GB are GiB; 12 * 10**9 bytes hold 14,648 slots."""
    opt = KVShape(40, 40, 128, 2)
    assert opt.token_bytes == 819_200
    assert 16 * Plan(opt, memory=12 * GIB, weights=0).num_blocks == 15_728
    assert 12 * 10**9 // opt.token_bytes == 14_648


def test_a_real_engine_counts_the_same_tokens_in_16_gib():
    """Source: vllm-project/vllm PR #44594: Qwen2.5-7B, 16 GiB of cache, 299,584 tokens."""
    shape = read_kv_shape(QWEN)
    assert shape.token_bytes == 57_344
    assert 16 * Plan(shape, memory=16 * GIB, weights=0).num_blocks == 299_584


def test_a_plan_agrees_with_the_log_of_a_real_start():
    """Source: vllm-project/vllm #10517: an RTX 3090, 1,952 blocks; its GiB have two decimals."""
    plan = Plan(
        read_kv_shape(LLAMA),
        memory=int(23.58 * GIB),
        weights=int(14.9888 * GIB),
        activations=int((17.06 - 14.9888 + 0.35) * GIB),
        share=0.9,
    )
    assert abs(plan.kv_bytes / GIB - 3.81) < 0.005
    assert abs(plan.num_blocks - 1_952) <= 1


# Configs.


def test_a_config_is_read_from_a_path_or_a_mapping(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA))
    assert read_kv_shape(path) == read_kv_shape(str(path)) == KVShape(32, 8, 128, 2)
    assert read_kv_shape(LLAMA) == KVShape(32, 8, 128, 2)


@pytest.mark.parametrize(
    ("change", "shape"),
    [
        ({"num_key_value_heads": None}, (32, 32, 128, 2)),
        ({"head_dim": 64}, (32, 8, 64, 2)),
        ({"head_dim": None}, (32, 8, 128, 2)),
        ({"model_type": "qwen3", "num_attention_heads": 64, "head_dim": 128}, (32, 8, 128, 2)),
        ({"torch_dtype": None, "dtype": "float32"}, (32, 8, 128, 4)),
        ({"torch_dtype": "torch.float16"}, (32, 8, 128, 2)),
        ({"model_type": "mistral", "sliding_window": None}, (32, 8, 128, 2)),
        ({"layer_types": ["full_attention"] * 32}, (32, 8, 128, 2)),
        ({"quantization_config": {"bits": 8, "kv_cache_scheme": None}}, (32, 8, 128, 2)),
    ],
)
def test_the_keys_of_today_s_families_are_read(change, shape):
    assert read_kv_shape(LLAMA | change) == KVShape(*shape)


def test_a_cache_in_fp8_or_int8_takes_half_whatever_the_weights_are():
    for dtype in ("fp8", "int8"):
        assert read_kv_shape(LLAMA, dtype).token_bytes == read_kv_shape(LLAMA).token_bytes // 2


REFUSED = [
    ({"model_type": "deepseek_v3"}, "model_type is deepseek_v3, none of gpt2, opt, llama"),
    ({"model_type": None}, "model_type is None, none of"),
    ({"model_type": "llava", "text_config": LLAMA}, "model_type is llava"),
    ({"model_type": "qwen3_next"}, "model_type is qwen3_next"),  # a state in most layers
    ({"kv_lora_rank": 512}, "kv_lora_rank is 512: another kind of cache"),  # a latent
    ({"sliding_window": 4_096}, "sliding_window is 4096"),  # Mistral 0.1
    (QWEN | {"use_sliding_window": True}, "sliding_window is 131072"),
    ({"layer_types": ["sliding_attention", "full_attention"]}, "layer_types has sliding_att"),
    ({"mamba_d_state": 16}, "mamba_d_state is 16"),  # Jamba
    ({"is_encoder_decoder": True}, "is_encoder_decoder is True"),  # T5
    ({"num_key_value_heads": [8, 4]}, "num_key_value_heads is [8, 4], not a whole number"),
    ({"num_key_value_heads": "8"}, "num_key_value_heads is '8', not a whole number"),
    ({"num_key_value_heads": 5}, "hidden_size 4096, 32 heads, 5 key/value heads"),
    ({"num_attention_heads": 3, "num_key_value_heads": 3}, "hidden_size 4096, 3 heads"),
    ({"num_hidden_layers": None}, "num_hidden_layers or n_layer is None, not a whole number"),
    ({"num_hidden_layers": 0}, "num_hidden_layers or n_layer is 0, not a whole number above 0"),
    ({"torch_dtype": None}, "dtype is None: give one of float32, float16"),
    ({"torch_dtype": "int4"}, "dtype is int4: give one of"),
    ({"quantization_config": {"kv_cache_scheme": {"num_bits": 8}}}, "give dtype"),
]


@pytest.mark.parametrize(("change", "said"), REFUSED)
def test_what_this_arithmetic_does_not_describe_is_refused_with_the_key(change, said):
    with pytest.raises(UnsupportedConfig) as refused:
        read_kv_shape(LLAMA | change)
    assert said in str(refused.value)


def test_heads_that_a_config_leaves_out_are_all_of_them_only_where_its_class_says_so():
    """In transformers 5.24 a Mistral without the key has 8, a Qwen3 heads of 128 numbers."""
    silent = {key: value for key, value in LLAMA.items() if key != "num_key_value_heads"}
    assert read_kv_shape(silent).num_kv_heads == 32
    with pytest.raises(UnsupportedConfig, match="num_key_value_heads is None"):
        read_kv_shape(silent | {"model_type": "mistral"})
    with pytest.raises(UnsupportedConfig, match="head_dim is None"):
        read_kv_shape(LLAMA | {"model_type": "qwen3"})


# Plans.


def test_weights_that_do_not_fit_are_refused_with_the_numbers():
    with pytest.raises(ValueError, match=r"0.9 of 1,000,000 bytes, less 2,000,000 of weights"):
        Plan(SEVEN_B, memory=1_000_000, weights=2_000_000, share=0.9)


def test_a_card_with_room_for_less_than_a_block_is_refused():
    block = 16 * SEVEN_B.token_bytes
    assert Plan(SEVEN_B, memory=block, weights=0).num_blocks == 1
    with pytest.raises(ValueError, match="no block fits"):
        Plan(SEVEN_B, memory=block - 1, weights=0)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_size_that_is_no_number_is_refused(number):
    with pytest.raises(ValueError, match="no block fits"):
        Plan(SEVEN_B, memory=10**12, weights=number)


def test_a_sequence_has_a_token_at_least():
    plan = Plan(SEVEN_B, memory=10 * 16 * SEVEN_B.token_bytes, weights=0)
    assert plan.sequences(1) == plan.num_blocks == 10
    for fit in (plan.sequences, plan.sequences_of_mean):
        for tokens in (0, -5, -8, -20):
            with pytest.raises(ValueError, match=f"at least 1 token, got {tokens}"):
                fit(tokens)


@pytest.mark.parametrize(
    "wrong",
    [{"share": 0}, {"share": 1.01}, {"weights": -1}, {"activations": -1}, {"block_size": 0}],
)
def test_a_share_outside_0_to_1_or_a_size_below_0_is_refused(wrong):
    with pytest.raises(ValueError, match="a share is above 0 and at most 1, sizes not negative"):
        Plan(**{"shape": SEVEN_B, "memory": GIB, "weights": 0} | wrong)


@pytest.mark.parametrize("numbers", [(0, 8, 128, 2), (32, 8, 128, 0.5), (32, -8, 128, 2)])
def test_a_shape_is_whole_numbers_above_0(numbers):
    with pytest.raises(ValueError, match="whole numbers above 0"):
        KVShape(*numbers)


PLANS = st.builds(
    Plan,
    st.builds(KVShape, *[st.integers(1, 64)] * 3, st.sampled_from([1, 2, 4])),
    memory=st.integers(2**30, 2**38),
    weights=st.integers(0, 2**28),
    activations=st.integers(0, 2**28),
    share=st.sampled_from([0.7, 0.9, 0.92, 1.0]),
    block_size=st.sampled_from([1, 3, 16, 256]),
)


@settings(max_examples=30)
@given(PLANS, st.integers(1, 5_000))
def test_a_plan_never_gives_out_more_than_is_left(plan, tokens):
    block_bytes = plan.block_size * plan.shape.token_bytes
    assert plan.num_blocks * block_bytes <= plan.kv_bytes < (plan.num_blocks + 1) * block_bytes
    taken = plan.kv_bytes + plan.weights + plan.activations
    assert abs(taken - Fraction(str(plan.share)) * plan.memory) <= 1
    held = plan.sequences(tokens)
    assert held * blocks_needed(tokens, plan.block_size) <= plan.num_blocks
    slots = plan.num_blocks * plan.block_size
    mean = plan.sequences_of_mean(tokens)
    assert slots // (tokens + plan.block_size - 1) <= mean <= slots // tokens


@settings(max_examples=30)
@given(PLANS, st.integers(1, 5_000))
def test_longer_sequences_and_more_weights_never_make_room(plan, tokens):
    assert plan.sequences(tokens + 1) <= plan.sequences(tokens)
    assert plan.sequences_of_mean(tokens + 1) <= plan.sequences_of_mean(tokens)
    rest = {"memory": plan.memory, "activations": plan.activations, "share": plan.share}
    heavier = Plan(plan.shape, weights=plan.weights + 2**20, block_size=plan.block_size, **rest)
    assert heavier.num_blocks <= plan.num_blocks
    assert heavier.kv_bytes == plan.kv_bytes - 2**20
