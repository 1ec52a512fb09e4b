"""The model itself: equal to transformers' on any checkpoint, and plain about what it cannot load.

Source of the tolerance, in float32: 1e-4 x max(1, largest reference logit).
"""

import json
import pickle
import shutil

import huggingface_hub.constants
import pytest
import torch
from models import (
    FLOATS,
    TINY,
    assert_equal_logits,
    random_tokens,
    reference,
    reference_greedy,
    tiny,
)
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from labcore.gpt2 import (
    GPT2,
    GPT2Config,
    ModelNotFound,
    UnsupportedModel,
    load_gpt2,
    random_gpt2,
    read_config,
)

RAW = json.loads((TINY / "config.json").read_text())
DEFAULT_EOS = 50_256  # what transformers writes where nobody says otherwise


def save_checkpoint(folder, **options):
    """A checkpoint as transformers writes it, every weight random, with tiny's tokenizer."""
    import transformers

    shape = {"n_layer": 3, "n_head": 5, "n_embd": 40, "vocab_size": 97, "n_positions": 33}
    torch.manual_seed(0)
    config = transformers.GPT2Config(**shape | {"layer_norm_epsilon": 0.01} | options)
    model = transformers.GPT2LMHeadModel(config).requires_grad_(False)
    for parameter in model.parameters():
        parameter.normal_(std=0.3)
    model.save_pretrained(folder)
    shutil.copy(TINY / "tokenizer.json", folder)
    return folder


def rewrite(folder, weights=lambda w: w, **options):
    """Change a checkpoint's weights, a dictionary by name, and options of its config.json."""
    save_file(weights(load_file(folder / "model.safetensors")), folder / "model.safetensors")
    raw = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(raw | options))


def assert_equals_the_reference(model, reference, batch):
    assert_equal_logits(model(batch), reference(batch).logits)


@pytest.fixture
def checkpoint(tmp_path):
    return save_checkpoint(tmp_path / "checkpoint")


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """An empty cache of the hub's, and no network."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    return tmp_path / "hub"


@pytest.mark.parametrize("dtype", FLOATS)
def test_logits_equal_the_reference_s_without_a_cache(dtype):
    batch = torch.tensor([random_tokens(77, seed) for seed in range(2)])
    assert_equals_the_reference(tiny(dtype), reference(TINY, dtype), batch)


@pytest.mark.parametrize("dtype", FLOATS)
def test_logits_equal_the_reference_s_with_its_cache(dtype):
    prompt = random_tokens(19)
    expected = reference_greedy(reference(TINY, dtype), prompt, 20)
    tokens = prompt + expected.argmax(-1).tolist()[:-1]
    assert_equal_logits(tiny(dtype)(torch.tensor([tokens]))[0, 18:], expected)


def test_the_last_of_1_024_positions_equals_the_reference_s():
    batch = torch.tensor([random_tokens(1_024)])
    assert_equals_the_reference(tiny(), reference(), batch)


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_checkpoint_of_another_shape_loads_from_a_folder(checkpoint, dtype):
    model, tokenizer = load_gpt2(str(checkpoint), dtype)
    assert model.config == GPT2Config(3, 5, 40, 97, 33, 0.01, DEFAULT_EOS)
    assert isinstance(tokenizer, Tokenizer)
    batch = torch.tensor([random_tokens(33, seed, 97) for seed in range(3)])
    assert_equals_the_reference(model, reference(checkpoint, dtype), batch)


def test_the_epsilon_of_the_layer_norms_is_the_checkpoint_s(tmp_path):
    batch = torch.tensor([random_tokens(9, 0, 97)])
    logits = []
    for epsilon in (1e-5, 1.0):
        folder = save_checkpoint(tmp_path / str(epsilon), layer_norm_epsilon=epsilon)
        logits.append(load_gpt2(str(folder))[0](batch))
    assert (logits[0] - logits[1]).abs().max() > 0.1


def test_options_that_are_all_at_their_default_may_be_missing(tmp_path):
    folder = save_checkpoint(tmp_path, n_layer=12, n_head=12, n_embd=24)
    (folder / "config.json").write_text(
        json.dumps({"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 24}
                   | {"vocab_size": 97, "n_positions": 33})
    )  # fmt: skip
    assert load_gpt2(str(folder))[0].config == GPT2Config(12, 12, 24, 97, 33, 1e-5, None)


@pytest.mark.parametrize("prefix", ["", "transformer."])
@pytest.mark.parametrize("old", [False, True], ids=["new", "old"])
def test_weights_load_by_either_name_and_with_the_masks_of_old_files(checkpoint, prefix, old):
    expected = load_gpt2(str(checkpoint))[0]

    def renamed(weights):
        weights = {prefix + key.removeprefix("transformer."): w for key, w in weights.items()}
        for layer in range(3 if old else 0):
            mask = torch.ones(1, 1, 33, 33).tril().bool()
            weights[f"{prefix}h.{layer}.attn.bias"] = mask
            weights[f"{prefix}h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)
        return weights | ({"lm_head.weight": weights[prefix + "wte.weight"] + 0} if old else {})

    rewrite(checkpoint, renamed)
    model = load_gpt2(str(checkpoint))[0]
    assert model.state_dict().keys() == expected.state_dict().keys()
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, expected.state_dict()[name]), name


def test_the_weights_take_the_type_that_is_asked_for_and_no_gradients():
    for dtype in (torch.float64, torch.bfloat16):
        weights = list(load_gpt2("tiny", dtype)[0].parameters())
        assert {w.dtype for w in weights} == {dtype}
        assert not any(w.requires_grad for w in weights)


def test_gpt2_comes_from_the_local_cache_of_the_hub_without_a_network(hub, tmp_path):
    repository = hub / "models--gpt2"
    folder = save_checkpoint(repository / "snapshots" / ("0" * 40))
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0" * 40)
    model, _ = load_gpt2("gpt2")
    assert model.config.n_embd == 40
    assert_equals_the_reference(
        model, reference(folder, torch.float32), torch.tensor([[1, 2, 3, 4]])
    )


@pytest.mark.parametrize("name", ["gpt2", "somebody/some-gpt2", "no/such/folder/anywhere"])
def test_a_model_that_is_nowhere_is_missed_by_name_with_a_way_out(hub, name):
    with pytest.raises(ModelNotFound, match=f'{name!r} is no folder.*"tiny" needs no network'):
        load_gpt2(name)


def test_the_environment_names_the_model_where_the_caller_does_not(checkpoint, monkeypatch):
    monkeypatch.setenv("LABCORE_MODEL", str(checkpoint))
    assert load_gpt2()[0].config.n_embd == 40
    assert load_gpt2("tiny")[0].config.n_embd == 192
    monkeypatch.setenv("LABCORE_MODEL", "")
    assert load_gpt2()[0].config.n_embd == 192
    monkeypatch.delenv("LABCORE_MODEL")
    assert load_gpt2()[0].config.n_embd == 192


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "tokenizer.json"])
def test_a_folder_that_lacks_a_file_is_refused_with_its_name(checkpoint, file):
    (checkpoint / file).unlink()
    with pytest.raises(ModelNotFound, match=f"{file} is missing"):
        load_gpt2(str(checkpoint))


class Opened:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


def test_a_pickle_is_not_opened(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").unlink()
    (checkpoint / "pytorch_model.bin").write_bytes(pickle.dumps(Opened(tmp_path / "opened")))
    with pytest.raises(ModelNotFound, match=r"model\.safetensors is missing"):
        load_gpt2(str(checkpoint))
    assert not (tmp_path / "opened").exists()
    pickle.loads((checkpoint / "pytorch_model.bin").read_bytes()).close()  # it would have shown
    assert (tmp_path / "opened").exists()


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("activation_function", "gelu"),
        ("activation_function", "relu"),
        ("n_inner", 767),
        ("scale_attn_weights", False),
        ("scale_attn_by_inverse_layer_idx", True),
        ("tie_word_embeddings", False),
        ("add_cross_attention", True),
    ],
)
def test_an_option_that_is_not_built_in_is_refused_by_name(option, value):
    with pytest.raises(UnsupportedModel, match=f"{option} is {value!r}, supported"):
        read_config(RAW | {option: value})


def test_the_options_that_are_built_in_are_accepted_under_either_name():
    expected = GPT2Config(5, 3, 192, 2_048, 1_024, 1e-5, 0)
    for option in ({}, {"activation_function": "gelu_pytorch_tanh"}, {"n_inner": 768}):
        assert read_config(RAW | option) == expected


@pytest.mark.parametrize("model_type", ["gpt_neox", "llama", None])
def test_another_kind_of_model_is_refused(checkpoint, model_type):
    rewrite(checkpoint, model_type=model_type)
    with pytest.raises(UnsupportedModel, match=f"{model_type!r}, not a GPT-2"):
        load_gpt2(str(checkpoint))


def test_a_width_that_heads_do_not_divide_is_refused():
    with pytest.raises(UnsupportedModel, match="n_embd 192 is no multiple of n_head 5"):
        read_config(RAW | {"n_head": 5})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n_layer": 4}, r"h\.3\.ln_1\.weight"),
        ({"n_layer": 2}, r"h\.2\.ln_1\.weight"),
        ({"n_positions": 34}, r"wpe\.weight"),
        ({"vocab_size": 96}, r"wte\.weight"),
    ],
)
def test_weights_unlike_their_config_are_refused_by_name(checkpoint, change, message):
    rewrite(checkpoint, **change)
    with pytest.raises(UnsupportedModel, match=f"(?s)weights unlike its config.*{message}"):
        load_gpt2(str(checkpoint))


SMALL = GPT2Config(n_layer=2, n_head=3, n_embd=192, vocab_size=2_048, n_positions=64)


def test_random_weights_depend_on_the_seed_and_on_nothing_else():
    def weights(seed):
        return torch.cat([w.flatten() for w in random_gpt2(SMALL, seed).parameters()])

    torch.manual_seed(0)
    first, state = weights(7), torch.random.get_rng_state()
    torch.manual_seed(1)
    assert torch.equal(weights(7), first)
    assert not torch.equal(weights(8), first)
    torch.manual_seed(0)
    assert torch.equal(torch.random.get_rng_state(), state)  # no draw from the shared generator


def test_random_weights_give_finite_logits_of_the_shape_asked_for():
    model = random_gpt2(GPT2Config(n_layer=2, n_head=2, n_embd=8, vocab_size=11, n_positions=5))
    logits = model(torch.tensor([[0, 10, 5, 5, 1]]))
    assert logits.shape == (1, 5, 11)
    assert logits.isfinite().all() and logits.std() > 0


def test_the_real_shape_has_the_124_million_parameters_that_it_is_named_after():
    with torch.device("meta"):
        model = GPT2(GPT2Config())
    assert sum(w.numel() for w in model.parameters()) == 124_439_808
    assert GPT2Config().head_dim == 64


def test_the_shipped_model_is_small_complete_and_no_pickle():
    files = {path.name: path.stat().st_size for path in TINY.iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= files.keys()
    assert sum(files.values()) <= 6_000_000
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    config = tiny().config
    assert (config.n_positions, config.head_dim) == (1_024, 64)
    assert (config.n_layer, config.n_head) == (5, 3)
    tokenizer = load_gpt2("tiny")[1]
    assert tokenizer.get_vocab_size() == config.vocab_size
    assert tokenizer.token_to_id("<|endoftext|>") == config.eos_token_id == 0


def test_random_weights_have_the_spread_that_gpt2_starts_with():
    model = random_gpt2(SMALL, 3)
    assert abs(model.wte.weight.std().item() - 0.02) < 0.001
    assert abs(model.h[1].mlp["c_proj"].weight.std().item() - 0.02) < 0.001
    assert not model.h[0].attn["c_attn"].bias.any() and (model.ln_f.weight == 1).all()


def test_a_model_lies_on_the_device_that_is_asked_for():
    assert {str(p.device) for p in load_gpt2("tiny", device="meta")[0].parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("field", "value"),
    [("n_head", 0), ("n_head", "3"), ("n_positions", None), ("n_embd", 192.0), ("n_layer", -1)],
)
def test_a_shape_that_is_no_whole_number_is_refused(field, value):
    raw = json.loads((TINY / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=f"{field} is {value!r}"):
        read_config(raw | {field: value})


@pytest.mark.parametrize(("option", "value"), [("eos_token_id", [0]), ("quantization_config", {})])
def test_several_ends_of_text_and_quantized_weights_are_refused(option, value):
    raw = json.loads((TINY / "config.json").read_text())
    with pytest.raises(UnsupportedModel, match=option):
        read_config(raw | {option: value})


def test_fields_that_a_config_leaves_out_are_gpt2_small_s():
    assert read_config({"model_type": "gpt2"}) == GPT2Config()


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_a_file_that_cannot_be_read_is_named(file, tmp_path):
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        shutil.copy(TINY / name, tmp_path)
    (tmp_path / file).write_text("version https://git-lfs.github.com/spec/v1")
    with pytest.raises(UnsupportedModel, match="cannot be read"):
        load_gpt2(str(tmp_path))
