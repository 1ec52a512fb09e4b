"""GPT-2 through a block table: equal to no cache at all, to a dense cache, and to transformers.

float64 within 1e-9, float32 within 1e-4 x max(1, largest reference logit); a token may differ only
where the reference's two best are that close. A call that is refused changes nothing.
"""

import copy

import pytest
import torch
from models import (
    FLOATS,
    NAN,
    PATHS,
    RUBBISH,
    TINY,
    assert_equal_logits,
    dense,
    dense_greedy,
    odd,
    paged_cache,
    poison,
    random_tokens,
    reference,
    reference_greedy,
    snapshot,
    tiny,
    tolerance,
    used,
)

from labcore.attention import gather
from labcore.blocks import OutOfBlocks
from labcore.caches import ContextOverflow, PagedKV
from labcore.decode import (
    forward_paged_decode,
    generate,
    greedy,
    prefill_packed,
    prefill_paged,
    sampler,
)
from labcore.gpt2 import load_gpt2

LENGTHS = (5, 19, 40, 77)
THROUGH_A_TABLE = pytest.mark.parametrize("path", list(PATHS))


def prompts_of(lengths):
    return {f"s{n}": random_tokens(n, n) for n in lengths}


def admit(model, kv, prompts):
    """Prefill each prompt by itself; the logits after each, by sequence."""
    logits = {}
    for seq_id, prompt in prompts.items():
        kv.tables.add(seq_id)
        logits[seq_id] = prefill_paged(model, kv, seq_id, prompt)
    return logits


def first_tie(ours, expected):
    """Where the reference ties, or None. Both are one sequence's logits, [steps, vocab_size].

    Logits must agree at all steps, tokens up to one whose two best are as close as the tolerance.
    """
    assert_equal_logits(ours, expected)
    best = expected.topk(2).values
    ties = (best[:, 0] - best[:, 1] <= tolerance(expected)).nonzero()
    stop = ties[0].item() if len(ties) else None
    assert ours.argmax(-1).tolist()[:stop] == expected.argmax(-1).tolist()[:stop]
    return stop


# Equality


@THROUGH_A_TABLE
@pytest.mark.parametrize("block_size", [1, 3, 16, 64])
def test_a_ragged_batch_of_5_19_40_77_tokens_equals_no_cache_for_20_steps(path, block_size):
    model = tiny()
    texts = {f"s{n}": random_tokens(n + 20, n) for n in LENGTHS}
    kv = paged_cache(model, 240 // block_size + 6, block_size)
    logits = admit(model, kv, {s: texts[s][:n] for s, n in zip(texts, LENGTHS, strict=True)})
    for (seq_id, text), n in zip(texts.items(), LENGTHS, strict=True):
        assert_equal_logits(logits[seq_id], dense(model, text)[n - 1])
    poison(kv, RUBBISH)
    where = kv.keys.data_ptr(), kv.values.data_ptr()
    for step in range(20):
        rows = list(zip(texts, LENGTHS, strict=True))
        rows = rows[step % 4 :] + rows[: step % 4]  # the order of the rows is another at each step
        tokens = [texts[s][n + step] for s, n in rows]
        out = forward_paged_decode(model, kv, [s for s, _ in rows], tokens, PATHS[path])
        expected = torch.stack([dense(model, texts[s])[n + step] for s, n in rows])
        assert_equal_logits(out, expected)
    kv.tables.check_invariants()
    assert used(kv) == sum(-(-(n + 20) // block_size) for n in LENGTHS)
    assert (kv.keys.data_ptr(), kv.values.data_ptr()) == where


@THROUGH_A_TABLE
@pytest.mark.parametrize("dtype", FLOATS)
def test_p1_blocks_in_any_physical_order_change_nothing(path, dtype):
    """Source: vllm-project/vllm test_attention.py; Dao-AILab/flash-attention #1314"""
    model, prompts = tiny(dtype), prompts_of(LENGTHS)
    texts = {s: dense_greedy(tiny(), prompt, 20) for s, prompt in prompts.items()}
    runs = {}
    for order in (list(range(128)), None):
        kv = paged_cache(model, 128, 16, order)
        ours = {s: [logits] for s, logits in admit(model, kv, prompts).items()}
        assert (kv.tables.block_table("s19") == [1, 2]) == (order is not None)
        rows = list(prompts) if order else ["s40", "s5", "s77", "s19"]
        for n in range(20):
            tokens = [texts[s][len(prompts[s]) + n] for s in rows]
            out = forward_paged_decode(model, kv, rows, tokens, PATHS[path])
            for seq_id, logits in zip(rows, out, strict=True):
                ours[seq_id].append(logits)
        runs[order is None] = {s: torch.stack(logits) for s, logits in ours.items()}
    for seq_id, text in texts.items():
        expected = dense(model, text)[len(prompts[seq_id]) - 1 :]
        first_tie(runs[False][seq_id], expected)
        first_tie(runs[True][seq_id], expected)
        assert_equal_logits(runs[True][seq_id], runs[False][seq_id])


@THROUGH_A_TABLE
def test_p1_three_sequences_of_one_block_each_in_falling_order(path):
    """Source: Dao-AILab/flash-attention #1314; tspeterkim/paged-attention-minimal #3"""
    model, texts = tiny(), {s: random_tokens(16, s) for s in range(3)}
    kv = paged_cache(model, 128, 16, list(range(127, -1, -1)))
    admit(model, kv, {s: text[:9] for s, text in texts.items()})
    assert [kv.tables.block_table(s) for s in texts] == [[127], [126], [125]]
    assert kv.block_tables(list(texts)).tolist() == [[127], [126], [125]]
    for n in range(9, 16):
        out = forward_paged_decode(
            model, kv, list(texts), [text[n] for text in texts.values()], PATHS[path]
        )
        assert_equal_logits(out, torch.stack([dense(model, text)[n] for text in texts.values()]))


def continue_alone(model, kv, prompt, steps):
    """Greedy tokens and the logits that chose them, [steps, vocab_size]; the sequence then ends."""
    logits = [admit(model, kv, {"s": prompt})["s"]]
    tokens = []
    for _ in range(steps):
        tokens.append(logits[-1].argmax().item())
        logits.append(forward_paged_decode(model, kv, ["s"], [tokens[-1]])[0])
    kv.tables.drop("s")
    return tokens, torch.stack(logits)


def test_p4_a_short_sequence_takes_over_the_blocks_of_a_long_one():
    """Source: same family as GeeeekExplorer/nano-vllm #163 and xLLM-AI/xllm PR #1984"""
    model, long, short = tiny(), random_tokens(60, 60), random_tokens(18, 18)
    kv = PagedKV(model.config, 4, 16, torch.float64)
    a_tokens, a_logits = continue_alone(model, kv, long, 4)
    b_tokens, b_logits = continue_alone(model, kv, short, 10)
    fresh_model = load_gpt2("tiny", torch.float64)[0]
    fresh_kv = PagedKV(model.config, 4, 16, torch.float64)
    fresh_tokens, fresh_logits = continue_alone(fresh_model, fresh_kv, short, 10)
    assert_equal_logits(b_logits, fresh_logits)
    assert_equal_logits(b_logits, dense(model, short + b_tokens)[len(short) - 1 :])
    assert b_tokens == fresh_tokens
    again_tokens, again_logits = continue_alone(model, kv, long, 4)
    assert_equal_logits(again_logits, a_logits)
    assert again_tokens == a_tokens
    assert kv.tables.allocator.num_free == 4


def positions_seen(model):
    """A list to which every pass of the model adds the positions it looks up, and how to stop."""
    seen = []
    handle = model.wpe.register_forward_pre_hook(lambda _, args: seen.append(args[0].flatten()))
    return seen, handle.remove


@THROUGH_A_TABLE
def test_p5_each_row_has_its_own_position_and_the_51st_token_has_position_50(path):
    """Source: huggingface/transformers #3021, #18104, PR #7552; mlx-lm PR #93; nano-vllm #67"""
    model, kv = tiny(), paged_cache(tiny(), 16, 16)
    texts = {"a": random_tokens(51, 50), "b": random_tokens(4, 3), "c": random_tokens(14, 13)}
    admit(model, kv, {s: text[:-1] for s, text in texts.items()})
    seen, stop = positions_seen(model)
    try:
        one = forward_paged_decode(model, kv, ["a"], texts["a"][-1:], PATHS[path])
        two = forward_paged_decode(
            model, kv, ["b", "c"], [texts["b"][-1], texts["c"][-1]], PATHS[path]
        )
    finally:
        stop()
    assert [positions.tolist() for positions in seen] == [[50], [3, 13]]
    assert_equal_logits(one[0], dense(model, texts["a"])[50])
    assert_equal_logits(two[0], dense(model, texts["b"])[3])
    assert_equal_logits(two[1], dense(model, texts["c"])[13])


def test_p5_a_prompt_beside_a_longer_one_equals_the_prompt_alone_and_padded_on_the_left():
    """Source: huggingface/transformers #3021, #10289, #18104"""
    prompt, other = [100, 200, 300], random_tokens(6, 6)
    padded = reference()(
        torch.tensor([[7, 7, 7, *prompt], other]),
        attention_mask=torch.tensor([[0, 0, 0, 1, 1, 1], [1] * 6]),
        position_ids=torch.tensor([[0, 0, 0, 0, 1, 2], range(6)]),
    ).logits[:, -1]
    kv = paged_cache(tiny(), 4, 4)
    for seq_id in ("alone", "prompt", "other"):
        kv.tables.add(seq_id)
    alone = prefill_packed(tiny(), kv, {"alone": prompt})[0]
    both = prefill_packed(tiny(), kv, {"prompt": prompt, "other": other})
    assert_equal_logits(alone, padded[0])
    assert_equal_logits(both, padded)


def test_p6_1024_tokens_fit_and_the_next_is_refused_before_any_block_is_taken():
    """Source: huggingface/transformers #1749, #530, #2774; gpt-2-simple #72; openai/gpt-2 #137"""
    model, tokens = odd(n_positions=1_024), random_tokens(1_026, 0, 53)
    kv = paged_cache(model, 70, 16)
    kv.tables.add("s")
    prefill_paged(model, kv, "s", tokens[:1_023])
    out = forward_paged_decode(model, kv, ["s"], [tokens[1_023]])
    assert_equal_logits(out[0], dense(model, tokens[:1_024])[-1])
    assert (len(kv.tables.block_table("s")), used(kv)) == (64, 64)
    before = snapshot(kv)
    for call in (
        lambda: forward_paged_decode(model, kv, ["s"], [0]),
        lambda: prefill_paged(model, kv, "s", [0]),
        lambda: prefill_packed(model, kv, {"s": [0]}),
    ):
        with pytest.raises(ContextOverflow, match=r"stores 1024 tokens, 1 more .* 1024 positions"):
            call()
        assert snapshot(kv) == before


@pytest.mark.parametrize(("length", "new"), [(1_023, 1), (1_000, 24), (1_000, 25), (1_024, 1)])
def test_p6_the_last_token_that_is_chosen_needs_no_slot(length, new):
    model, kv = odd(n_positions=1_024), paged_cache(odd(n_positions=1_024), 64, 16)
    prompt = random_tokens(length, 0, 53)
    (answer,) = generate(model, kv, [prompt], new)
    assert len(answer) == new
    chosen_by = dense(model, prompt + answer[:-1])[length - 1 :]
    assert answer == chosen_by.argmax(-1).tolist()
    assert used(kv) == 0


@pytest.mark.parametrize(
    ("length", "new", "error", "message"),
    [
        (1_000, 26, ContextOverflow, "1025 tokens to store, 1024 positions"),
        (1_025, 1, ContextOverflow, "1025 tokens to store, 1024 positions"),
        (1_025, 0, ContextOverflow, "1024 positions"),
        (0, 5, ValueError, "no tokens"),
    ],
)
def test_p6_what_cannot_end_is_not_begun(length, new, error, message):
    model, kv = odd(n_positions=1_024), paged_cache(odd(n_positions=1_024), 66, 16)
    before = snapshot(kv)
    with pytest.raises(error, match=message):
        generate(model, kv, [[1, 2], random_tokens(length, 0, 53)], new)
    assert snapshot(kv) == before


def test_p6_a_prompt_of_1025_tokens_and_an_empty_one_are_refused():
    model, kv = odd(n_positions=1_024), paged_cache(odd(n_positions=1_024), 66, 16)
    kv.tables.add("s")
    before = snapshot(kv)
    for chunk in (None, 16):
        with pytest.raises(ContextOverflow, match=r"stores 0 tokens, 1025 more .* 1024 positions"):
            prefill_paged(model, kv, "s", random_tokens(1_025, 0, 53), chunk)
        with pytest.raises(ValueError, match="'s': no tokens"):
            prefill_paged(model, kv, "s", [], chunk)
    assert snapshot(kv) == before


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("chunk", [1, 7, 16, 39, 40, 100])
def test_p7_a_prompt_in_chunks_equals_the_prompt_in_one_pass(chunk, dtype):
    """Source: nano-vllm #212, PR #213; sglang-jax #20"""
    model, prompt = tiny(dtype), random_tokens(41, 40)
    kv = paged_cache(model, 8, 16)
    poison(kv, RUBBISH)
    kv.tables.add("s")
    seen, stop = positions_seen(model)
    try:
        logits = prefill_paged(model, kv, "s", prompt[:40], chunk)
    finally:
        stop()
    if chunk == 16:
        assert [(p[0].item(), len(p)) for p in seen] == [(0, 16), (16, 16), (32, 8)]
    expected = dense(model, prompt)
    assert_equal_logits(logits, expected[39])
    assert_equal_logits(forward_paged_decode(model, kv, ["s"], prompt[40:])[0], expected[40])
    assert used(kv) == 3


@pytest.mark.parametrize("fill", [NAN, RUBBISH], ids=["nan", "rubbish"])
@pytest.mark.parametrize("lengths", [(3, 3), (5, 19), (19, 5), (1, 16, 17, 50)])
def test_p7_each_of_the_sequences_packed_in_one_pass_equals_itself_alone(lengths, fill):
    """Source: huggingface/transformers, continuous batching mask tests"""
    model, texts = tiny(), {i: random_tokens(n + 1, i) for i, n in enumerate(lengths)}
    kv = paged_cache(model, 16, 16)
    poison(kv, fill)
    for seq_id in texts:
        kv.tables.add(seq_id)
    logits = prefill_packed(model, kv, {s: text[:-1] for s, text in texts.items()})
    last = [text[-1] for text in texts.values()]
    after = forward_paged_decode(model, kv, list(texts), last)
    for seq_id, text in texts.items():
        expected = dense(model, text)
        assert_equal_logits(logits[seq_id], expected[-2])
        assert_equal_logits(after[seq_id], expected[-1])


def test_p7_a_sequence_does_not_attend_to_the_one_before_it_in_the_pack():
    model, rows = tiny(), []
    for other in ([1, 2, 3], [4, 5, 6]):
        kv = paged_cache(model, 4, 16)
        kv.tables.add("other")
        kv.tables.add("s")
        rows.append(prefill_packed(model, kv, {"other": other, "s": [7, 8, 9]}))
    assert torch.equal(rows[0][1], rows[1][1])
    assert not torch.equal(rows[0][0], rows[1][0])


def test_packed_prompts_may_continue_what_sequences_already_hold():
    model, kv = tiny(), paged_cache(tiny(), 16, 4)
    texts = {i: random_tokens(n, i) for i, n in enumerate((4, 9, 13))}
    admit(model, kv, {s: text[: 3 * s + 1] for s, text in texts.items()})
    logits = prefill_packed(model, kv, {s: text[3 * s + 1 :] for s, text in texts.items()})
    assert_equal_logits(logits, torch.stack([dense(model, t)[-1] for t in texts.values()]))


def test_p8_a_second_batch_with_the_same_objects_equals_the_first():
    """Source: huggingface/transformers PR #45943"""
    model = load_gpt2("tiny", torch.float64)[0]
    kv, prompts = paged_cache(model, 20, 16), list(prompts_of(LENGTHS).values())
    config = copy.deepcopy(model.config)
    weights = {name: w.clone() for name, w in model.state_dict().items()}
    first = generate(model, kv, prompts, 20)
    assert used(kv) == 0
    second = generate(model, kv, prompts, 20)
    assert first == second
    assert used(kv) == 0
    assert model.config == kv.config == config
    assert all(torch.equal(w, weights[name]) for name, w in model.state_dict().items())
    for prompt, answer in zip(prompts, first, strict=True):
        assert dense_greedy(model, prompt, len(answer)) == prompt + answer


PROMPTS = (
    "It was a truth",
    "Emma was very fond of her father, and",
    "Mr. Darcy had at first scarcely allowed her to be pretty; he had looked at her without",
    "The family of Dashwood had been long settled in Sussex. Their estate was large, and their "
    "residence was at Norland Park, in the centre of their property, where, for many generations, "
    "they had lived in so respectable a manner as to engage the general good opinion of their",
)


@pytest.mark.parametrize("dtype", FLOATS)
def test_p9_four_prompts_times_80_steps_equal_transformers_up_to_ties(dtype, record_property):
    """Source: kekzl/imp #1314; huggingface/transformers #25420; llama.cpp #4479, #6583, #7859"""
    model, kv = tiny(dtype), paged_cache(tiny(dtype), 64, 16)
    tokenizer = load_gpt2("tiny")[1]
    prompts = {text: tokenizer.encode(text).ids for text in PROMPTS}
    cached, whole, texts = {}, {}, {}
    for seq_id, prompt in prompts.items():
        cached[seq_id] = reference_greedy(reference(TINY, dtype), prompt, 80)
        texts[seq_id] = prompt + cached[seq_id].argmax(-1).tolist()[:-1]
        logits = reference(TINY, dtype)(torch.tensor([texts[seq_id]])).logits[0]
        whole[seq_id] = logits[len(prompt) - 1 :]
    ours = {s: [out] for s, out in admit(model, kv, prompts).items()}
    for step in range(79):
        tokens = [text[len(prompts[s]) + step] for s, text in texts.items()]
        out = forward_paged_decode(model, kv, list(texts), tokens, ["in_place", "gather"][step % 2])
        for seq_id, row in zip(texts, out, strict=True):
            ours[seq_id].append(row)
    stops = {s: first_tie(torch.stack(ours[s]), cached[s]) for s in prompts}
    for seq_id in prompts:
        first_tie(torch.stack(ours[seq_id]), whole[seq_id])
    tied = {s: stop for s, stop in stops.items() if stop is not None}
    record_property("rows whose tokens were compared up to a tie", tied)
    print(f"{dtype}: {len(tied)} of 4 rows stopped at a tie: {tied}")
    assert dtype == torch.float32 or not tied
    assert sum(80 if stop is None else stop for stop in stops.values()) >= 160


def test_p9_a_batch_of_four_equals_batches_of_one():
    model, prompts = tiny(torch.float32), prompts_of(LENGTHS)
    together, alone = paged_cache(model, 16, 16), paged_cache(model, 16, 16)
    texts = {s: prompt + random_tokens(10, s) for s, prompt in prompts.items()}
    for kv in (together, alone):
        admit(model, kv, prompts)
    for step in range(10):
        tokens = [text[len(prompts[s]) + step] for s, text in texts.items()]
        batch = forward_paged_decode(model, together, list(texts), tokens)
        for row, seq_id in enumerate(texts):
            (one,) = forward_paged_decode(model, alone, [seq_id], [tokens[row]])
            first_tie(batch[row][None], one[None])


def test_the_small_model_says_something_else_after_each_prompt():
    """Else a test that compares answers would not see a row that was taken for another."""
    assert len({tuple(dense_greedy(odd(), [token], 5)[1:]) for token in range(10)}) >= 8


def test_p9_a_token_may_differ_at_a_tie_and_nowhere_else():
    """A hand-made row whose two best logits differ by 1e-6 in its third step."""
    expected = torch.tensor([[0, 1, 2.0], [0, 3, 1.0], [1 + 1e-6, 1, 0], [5, 0, 1.0]])
    ours = expected.clone()
    assert first_tie(ours, expected) == 2
    ours[2] = torch.tensor([1, 1 + 1e-6, 0])
    assert ours[2].argmax() != expected[2].argmax()
    assert first_tie(ours, expected) == 2
    assert first_tie(ours[:2], expected[:2]) is None
    with pytest.raises(AssertionError):  # in float64 1e-6 is no tie, and no rounding
        first_tie(ours.double(), expected.double())
    ours[3, 2] = 1.1
    with pytest.raises(AssertionError):  # behind a tie the logits are still compared
        first_tie(ours, expected)


# Sharing


@THROUGH_A_TABLE
@pytest.mark.parametrize("writers", [("one", "two"), ("two", "one"), ("both",)])
def test_a_prefix_of_40_tokens_takes_3_blocks_forked_still_3_and_then_4(path, writers):
    """Source: Kwon et al. 2023, section 4.4"""
    model, kv = tiny(), paged_cache(tiny(), 8, 16)
    prefix = random_tokens(40, 40)
    texts = {s: prefix + random_tokens(9, s) for s in ("one", "two")}
    admit(model, kv, {"one": prefix})
    assert used(kv) == 3
    kv.tables.fork("one", "two")
    assert used(kv) == 3
    assert kv.tables.block_table("one") == kv.tables.block_table("two")
    for n in range(40, 49):  # 48 tokens fill three blocks, the 49th needs a fourth
        for writer in writers:
            some = list(texts) if writer == "both" else [writer]
            out = forward_paged_decode(model, kv, some, [texts[s][n] for s in some], PATHS[path])
            assert_equal_logits(out, torch.stack([dense(model, texts[s])[n] for s in some]))
            kv.tables.check_invariants()
        assert used(kv) == (4 if n < 48 else 6)
    one, two = (kv.tables.block_table(s) for s in ("one", "two"))
    assert one[:2] == two[:2] and not set(one[2:]) & set(two[2:])
    kv.tables.drop("one")
    poison(kv, NAN)
    (out,) = forward_paged_decode(model, kv, ["two"], [11], PATHS[path])
    assert_equal_logits(out, dense(model, [*texts["two"], 11])[-1])
    kv.tables.drop("two")
    assert used(kv) == 0


def test_a_prompt_that_continues_a_fork_does_not_touch_the_parent():
    model, kv = tiny(), paged_cache(tiny(), 8, 4)
    parent, more = random_tokens(7, 1), random_tokens(6, 2)
    admit(model, kv, {"p": parent[:6]})
    kv.tables.fork("p", "c")
    logits = prefill_paged(model, kv, "c", more, chunk=4)
    assert_equal_logits(logits, dense(model, parent[:6] + more)[-1])
    assert_equal_logits(
        forward_paged_decode(model, kv, ["p"], parent[6:])[0], dense(model, parent)[-1]
    )


def test_a_prompt_may_come_as_what_can_be_read_once():
    model, prompt = tiny(), random_tokens(9, 9)
    logits = []
    for tokens in (prompt, iter(prompt)):
        kv = paged_cache(tiny(), 6, 4)
        kv.tables.add(0)
        logits.append(prefill_packed(model, kv, {0: tokens}))
    assert torch.equal(*logits)


def test_four_samples_of_one_prompt_part_in_one_step():
    model, kv, prompt = tiny(), paged_cache(tiny(), 6, 4), random_tokens(9, 9)
    admit(model, kv, {0: prompt})
    for sample in (1, 2, 3):
        kv.tables.fork(0, sample)
    for tokens in ([5, 6, 7, 8], [9, 9, 9, 9]):
        prompt_of = {s: [*prompt, 5 + s, 9][: kv.tables.num_tokens(s) + 1] for s in range(4)}
        out = forward_paged_decode(model, kv, [2, 0, 3, 1], [tokens[s] for s in (2, 0, 3, 1)])
        expected = torch.stack([dense(model, prompt_of[s])[-1] for s in (2, 0, 3, 1)])
        assert_equal_logits(out, expected)
    assert used(kv) == 6


# Refusals


def crowded(dtype=torch.float64, num_blocks=6):
    """Blocks of 4; "a" and "b" share 6 tokens, "full" ends on a boundary, "empty" has none."""
    model = odd(dtype)
    kv = paged_cache(model, num_blocks, 4)
    admit(model, kv, {"a": [1, 2, 3, 4, 5, 6], "full": [7, 8, 9, 10]})
    kv.tables.fork("a", "b")
    kv.tables.add("empty")
    poison(kv, RUBBISH)
    return model, kv


def step(model, kv, seq_ids, tokens, attention="in_place"):
    return forward_paged_decode(model, kv, seq_ids, tokens, attention)


REFUSED = {
    "out of blocks in the middle of a batch": (
        lambda m, kv: step(m, kv, ["a", "b", "full", "empty"], [1, 2, 3, 4]),
        OutOfBlocks,
        "need 3 blocks, 2 of 5",
    ),
    "out of blocks in a prompt": (
        lambda m, kv: prefill_paged(m, kv, "empty", [1] * 9),
        OutOfBlocks,
        "need 3 blocks, 2 of 5",
    ),
    "out of blocks in the third chunk": (
        lambda m, kv: prefill_paged(m, kv, "empty", [1] * 9, chunk=4),
        OutOfBlocks,
        "need 3 blocks, 2 of 5",
    ),
    "out of blocks in a pack": (
        lambda m, kv: prefill_packed(m, kv, {"a": [1], "empty": [1] * 5}),
        OutOfBlocks,
        "need 3 blocks, 2 of 5",
    ),
    "past the last position": (
        lambda m, kv: prefill_packed(m, kv, {"full": [1], "a": [1] * 36}),
        ContextOverflow,
        "'a' stores 6 tokens, 36 more would pass the model's 41 positions",
    ),
    "an empty prompt": (lambda m, kv: prefill_paged(m, kv, "empty", []), ValueError, "no tokens"),
    "an empty prompt in a pack": (
        lambda m, kv: prefill_packed(m, kv, {"a": [1], "empty": []}),
        ValueError,
        "'empty': no tokens",
    ),
    "an unknown sequence": (lambda m, kv: step(m, kv, ["a", "x"], [1, 2]), KeyError, "'x'"),
    "an unknown sequence's prompt": (
        lambda m, kv: prefill_paged(m, kv, "x", [1]),
        KeyError,
        "'x'",
    ),
    "a repeated sequence": (
        lambda m, kv: step(m, kv, ["a", "full", "a"], [1, 2, 3]),
        ValueError,
        "named twice",
    ),
    "more sequences than tokens": (
        lambda m, kv: step(m, kv, ["a", "b"], [1]),
        ValueError,
        "1 tokens for 2 sequences",
    ),
    "a token behind the vocabulary": (
        lambda m, kv: step(m, kv, ["a", "b"], [1, 53]),
        ValueError,
        r"\[53\] are outside a vocabulary of 53",
    ),
    "a token before the vocabulary": (
        lambda m, kv: prefill_paged(m, kv, "a", [1, -1]),
        ValueError,
        r"\[-1\] are outside",
    ),
    "a token that is no integer": (
        lambda m, kv: step(m, kv, ["a", "b"], [1, 2.0]),
        TypeError,
        "float",
    ),
    "a cache of another shape": (
        lambda m, kv: step(odd(n_head=5), kv, ["a"], [1]),
        ValueError,
        "n_head=3.*n_head=5",
    ),
    "a cache of another type": (
        lambda m, kv: step(odd(torch.float32), kv, ["a"], [1]),
        TypeError,
        "a cache of torch.float64 on cpu, a model of torch.float32 on cpu",
    ),
    "a prompt for a model of another type": (
        lambda m, kv: prefill_paged(odd(torch.float32), kv, "a", [1]),
        TypeError,
        "a cache of torch.float64",
    ),
    "an unknown attention": (
        lambda m, kv: step(m, kv, ["a"], [1], "flash"),
        ValueError,
        "one of gather, in_place, triton, got 'flash'",
    ),
    "no sequences": (lambda m, kv: step(m, kv, [], []), ValueError, "no sequences"),
    "a pack of nothing": (lambda m, kv: prefill_packed(m, kv, {}), ValueError, "no sequences"),
    "chunks of 0": (
        lambda m, kv: prefill_paged(m, kv, "a", [1, 2], chunk=0),
        ValueError,
        "at least one token, got 0",
    ),
    "chunks of -1": (
        lambda m, kv: prefill_paged(m, kv, "a", [1, 2], chunk=-1),
        ValueError,
        "at least one token, got -1",
    ),
    "chunks of 1.5": (
        lambda m, kv: prefill_paged(m, kv, "a", [1, 2], chunk=1.5),
        TypeError,
        "float",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_call_changes_nothing(what):
    call, error, message = REFUSED[what]
    model, kv = crowded(num_blocks=5)
    before = snapshot(kv)
    with pytest.raises(error, match=message):
        call(model, kv)
    assert snapshot(kv) == before
    kv.tables.check_invariants()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_refused_in_place_before_anything_changes_and_works_gathered(dtype):
    model, kv = crowded(dtype)
    before = snapshot(kv)
    with pytest.raises(TypeError, match=f'not {dtype}: use "gather"'):
        forward_paged_decode(model, kv, ["a"], [1])
    assert snapshot(kv) == before
    out = forward_paged_decode(model, kv, ["a", "full"], [7, 11], "gather")
    for row, text in enumerate(([1, 2, 3, 4, 5, 6, 7], [7, 8, 9, 10, 11])):
        expected = model(torch.tensor([text]))[0, -1]
        assert (out[row] - expected).abs().max() < 0.05 * expected.abs().max()


def test_the_last_free_blocks_are_enough_for_a_step_that_needs_just_them():
    model, kv = crowded(num_blocks=5)
    before = kv.tables.allocator.num_free
    assert kv.tables.blocks_to_append({"a": 1, "b": 1, "full": 1}) == before == 2
    out = forward_paged_decode(model, kv, ["a", "b", "full"], [1, 2, 3])
    assert kv.tables.allocator.num_free == 0
    texts = [[1, 2, 3, 4, 5, 6, 1], [1, 2, 3, 4, 5, 6, 2], [7, 8, 9, 10, 3]]
    assert_equal_logits(out, torch.stack([dense(model, text)[-1] for text in texts]))


class Interrupted(Exception):
    pass


def interrupt(*_):
    raise Interrupted


def interrupted_in_the_second_layer(block_tables, seq_lens, pool):
    attend, calls = gather(block_tables, seq_lens, pool), []

    def once_only(*args):
        calls.append(args)
        return attend(*args) if len(calls) < 2 else interrupt()

    return once_only


@pytest.mark.parametrize("attention", [interrupt, interrupted_in_the_second_layer])
def test_a_step_interrupted_in_the_model_stores_nothing_and_the_next_is_exact(attention):
    model, kv = crowded()
    with pytest.raises(Interrupted):
        forward_paged_decode(model, kv, ["a", "full"], [20, 21], attention)
    kv.tables.check_invariants()
    assert [kv.tables.num_tokens(s) for s in ("a", "b", "full", "empty")] == [6, 6, 4, 0]
    poison(kv, NAN)
    out = forward_paged_decode(model, kv, ["b", "a", "full"], [30, 31, 32])
    texts = [[1, 2, 3, 4, 5, 6, 30], [1, 2, 3, 4, 5, 6, 31], [7, 8, 9, 10, 32]]
    assert_equal_logits(out, torch.stack([dense(model, text)[-1] for text in texts]))
    for seq_id in kv.tables.seq_ids():
        kv.tables.drop(seq_id)
    assert used(kv) == 0


@pytest.mark.parametrize(("passes", "stored"), [(1, 0), (2, 5), (3, 10)])
def test_a_prompt_interrupted_in_a_chunk_has_stored_the_chunks_before_it(passes, stored):
    model, kv, prompt, calls = odd(), paged_cache(odd(), 8, 4), random_tokens(12, 1, 53), []
    kv.tables.add("s")

    def count(*_):
        calls.append(1)
        return interrupt() if len(calls) == passes else None

    handle = model.h[1].register_forward_pre_hook(count)
    try:
        with pytest.raises(Interrupted):
            prefill_paged(model, kv, "s", prompt, chunk=5)
    finally:
        handle.remove()
    assert kv.tables.num_tokens("s") == stored
    poison(kv, NAN)
    logits = prefill_paged(model, kv, "s", prompt[stored:])
    assert_equal_logits(logits, dense(model, prompt)[-1])
    assert used(kv) == 3


# Generation


@THROUGH_A_TABLE
def test_generated_tokens_equal_a_dense_greedy_loop(path):
    model, kv = tiny(), paged_cache(tiny(), 16, 16)
    prompts = list(prompts_of(LENGTHS).values())
    answers = generate(model, kv, prompts, 20, attention=PATHS[path])
    for prompt, answer in zip(prompts, answers, strict=True):
        expected = dense_greedy(model, prompt, 20)[-20:]
        eos = model.config.eos_token_id
        assert answer == expected[: expected.index(eos) if eos in expected else None]
    assert used(kv) == 0


def scripted(texts):
    """A `choose` that answers from a script, one text a row; 0 is the end of text."""
    return lambda logits, rows, step: [texts[row][step] for row in rows]


def test_generation_stops_at_the_end_of_text_row_by_row_and_gives_the_blocks_back_at_once():
    model, kv = odd(eos_token_id=0), paged_cache(odd(eos_token_id=0), 12, 4)
    script, free = [[5, 0], [0], [6, 7, 8, 9], [1, 2, 3, 0]], []

    def choose(logits, rows, step):
        free.append(kv.tables.allocator.num_free)
        return scripted(script)(logits, rows, step)

    prompts = [[1] * 4, [2] * 8, [3] * 3, [4] * 5]
    assert generate(model, kv, prompts, 4, choose) == [[5], [], [6, 7, 8, 9], [1, 2, 3]]
    assert free == [6, 7, 8, 8]  # in use: 1 + 2 + 1 + 2; then 2 + 1 + 2; then 2 + 2, twice
    assert used(kv) == 0


def test_no_more_is_run_than_the_tokens_asked_for_need():
    model, kv = odd(), paged_cache(odd(), 12, 4)
    seen, stop = positions_seen(model)
    try:
        assert generate(model, kv, [[1, 2, 3], [4]], 0) == [[], []]
        assert [len(answer) for answer in generate(model, kv, [[1, 2, 3], [4]], 3)] == [3, 3]
    finally:
        stop()
    assert [p.tolist() for p in seen[-3:]] == [[0, 1, 2, 0], [3, 1], [4, 2]]
    assert used(kv) == 0


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"prompts": [[1] * 6, [2] * 7], "max_new_tokens": 30}, OutOfBlocks),
        ({"prompts": [[1] * 6, [2] * 27], "max_new_tokens": 3}, OutOfBlocks),
        ({"prompts": [[1], []]}, ValueError),
        ({"prompts": [[1], [53]]}, ValueError),
        ({"prompts": [[1], [1.5]]}, TypeError),
        ({"prompts": []}, ValueError),
        ({"attention": "flash"}, ValueError),
        ({"attention": interrupted_in_the_second_layer}, Interrupted),
        ({"choose": interrupt}, Interrupted),
        ({"choose": scripted([[99, 99], [1, 1]])}, ValueError),
        ({"choose": scripted([[1, 1], [1, 53]])}, ValueError),  # in the last step, too
    ],
)
def test_generation_gives_every_block_back_on_errors_and_leaves_other_sequences_alone(
    arguments, error
):
    model, kv = odd(), paged_cache(odd(), 8, 4)
    admit(model, kv, {"other": [1, 2, 3, 4, 5]})
    with pytest.raises(error):
        generate(model, kv, **{"prompts": [[1, 2], [3]], "max_new_tokens": 2} | arguments)
    kv.tables.check_invariants()
    assert (kv.tables.seq_ids(), used(kv)) == (["other"], 2)
    (out,) = forward_paged_decode(model, kv, ["other"], [6])
    assert_equal_logits(out, dense(model, [1, 2, 3, 4, 5, 6])[-1])


def test_sampling_depends_on_the_seed_and_not_on_the_other_rows_nor_on_their_order():
    model, kv = odd(), paged_cache(odd(), 40, 4)
    prompts = [random_tokens(n, n, 53) for n in (3, 9, 5)]
    answers = generate(model, kv, prompts, 12, sampler(5.0, seed=3))
    assert generate(model, kv, prompts, 12, sampler(5.0, seed=3)) == answers
    assert generate(model, kv, prompts, 12, sampler(5.0, seed=4)) != answers
    assert generate(model, kv, prompts[:1], 12, sampler(5.0, seed=3)) == answers[:1]
    logits = torch.randn(3, 53)
    choose = sampler(1.0, seed=1)
    a, b, c = choose(logits, [0, 1, 2], 5)
    assert choose(logits.flip(0), [2, 1, 0], 5) == [c, b, a]
    assert choose(logits[1:2], [1], 5) == [b]


def test_sampled_tokens_follow_the_softmax_of_the_logits_over_the_temperature():
    logits = torch.tensor([[0.0, 1.0, 2.0]])
    for temperature in (0.5, 2.0):
        choose = sampler(temperature)
        drawn = torch.tensor([choose(logits, [0], step)[0] for step in range(2_000)])
        shares = drawn.bincount(minlength=3) / 2_000
        assert (shares - (logits[0] / temperature).softmax(-1)).abs().max() < 0.04
    cold = sampler(1e-3)
    assert {cold(logits, [0], step)[0] for step in range(50)} == {2}


@pytest.mark.parametrize("temperature", [0, -1.0, NAN])
def test_a_temperature_that_is_not_above_0_is_refused(temperature):
    with pytest.raises(ValueError, match="temperature is above 0"):
        sampler(temperature)


def test_rows_and_steps_draw_from_streams_of_their_own():
    choose, logits = sampler(1.0, seed=1), torch.zeros(8, 1_000)
    drawn = [choose(logits, range(8), step) for step in range(8)]
    assert len({token for tokens in drawn for token in tokens}) > 55  # of 64 draws of 1,000


@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-9])
def test_a_temperature_near_0_is_greedy(temperature):
    logits = torch.tensor([[1.0, 100.0, 3.0], [7.0, -1e4, 6.9]]).bfloat16()
    assert sampler(temperature)(logits, [0, 1], 0) == [1, 0]


def test_a_cache_on_another_device_is_refused_by_name():
    model = odd()
    kv = PagedKV(model.config, 4, 4, torch.float64, device="meta")
    kv.tables.add("s")
    with pytest.raises(TypeError, match=r"torch.float64 on meta, a model of torch.float64 on cpu"):
        forward_paged_decode(model, kv, ["s"], [1])
    assert kv.tables.block_table("s") == []


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({"max_new_tokens": -1}, "-1 new tokens"),
        ({"samples": 0}, "3 new tokens, 0 samples"),
        ({"max_new_tokens": 1, "attention": "flash"}, "gather, in_place, triton, got 'flash'"),
        ({"prompts": [[1] * 40, [2]]}, "42 tokens to store, 41 positions"),
        ({"prompts": [[2], [1] * 40]}, "42 tokens to store, 41 positions"),
    ],
)
def test_generate_refuses_before_anything_runs(arguments, error):
    model, kv = odd(), paged_cache(odd(), 30, 4)
    before = snapshot(kv)
    with pytest.raises(ValueError, match=error):
        generate(model, kv, **({"prompts": [[1, 2]], "max_new_tokens": 3} | arguments))
    assert snapshot(kv) == before


def test_prompts_may_be_iterators_and_a_choice_may_be_a_tensor():
    model, kv = odd(), paged_cache(odd(), 30, 4)
    answers = generate(
        model, kv, (iter(p) for p in [[1, 2], [3]]), 4, lambda logits, *_: logits.argmax(-1)
    )
    assert answers == generate(model, kv, [[1, 2], [3]], 4)
    assert type(answers[0][0]) is int


def test_a_generation_inside_a_generation_has_sequences_of_its_own():
    model, kv = odd(), paged_cache(odd(), 30, 4)

    def choose(logits, rows, step):
        assert generate(model, kv, [[1, 2]], 3) == [dense_greedy(model, [1, 2], 3)[2:]]
        return greedy(logits, rows, step)

    assert generate(model, kv, [[3]], 3, choose) == [dense_greedy(model, [3], 3)[1:]]
    assert used(kv) == 0
