"""Samples and beams of one prompt on forked tables, against searches that share nothing.

The oracle runs the whole text of every beam anew, looks at every token of the vocabulary, and never
stops early. Scores are equal within 1e-9; transformers', which are float32, within 1e-4.
"""

from functools import cache
from itertools import pairwise

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from models import (
    NAN,
    dense,
    dense_greedy,
    odd,
    paged_cache,
    poison,
    random_tokens,
    reference,
    snapshot,
    tiny,
    used,
)

from labcore.admission import group_blocks
from labcore.attention import in_place
from labcore.beams import Beam, beam_search, best_first, replace_beams
from labcore.blocks import BlockAllocator, BlockTables, OutOfBlocks
from labcore.caches import ContextOverflow
from labcore.decode import forward_paged_decode, generate, greedy, sampler
from labcore.gpt2 import GPT2Config, load_gpt2, random_gpt2


@cache
def brief(seed=2, vocab_size=9, eos=0, std=0.5):
    """A model of 1 layer and 9 tokens that ends an answer every few tokens."""
    model = random_gpt2(GPT2Config(1, 2, 8, vocab_size, 41, eos_token_id=eos)).double()
    torch.manual_seed(seed)
    for parameter in model.parameters():
        parameter.normal_(std=std)
    return model


def naive_beam_search(model, prompt, num_beams, max_new_tokens, length_penalty=1.0):
    """Every continuation of every beam, each from scratch, to the last step."""
    live, answers, eos = [([], 0.0)], [], model.config.eos_token_id
    for length in range(1, max_new_tokens + 1):
        continuations = []
        for tokens, total in live:
            log_probs = dense(model, [*prompt, *tokens])[-1].log_softmax(-1).tolist()
            continuations += [([*tokens, t], total + p) for t, p in enumerate(log_probs)]
        continuations.sort(key=lambda beam: -beam[1])
        for tokens, total in continuations[:num_beams]:
            if length == max_new_tokens or tokens[-1] == eos:
                answer = tokens[:-1] if tokens[-1] == eos else tokens
                answers.append((answer, total / length**length_penalty))
        live = [beam for beam in continuations if beam[0][-1] != eos][:num_beams]
    return sorted(answers, key=lambda answer: -answer[1])[:num_beams]


def assert_same_answers(ours, expected, tolerance=1e-9):
    """The same tokens in the same order, and scores as close as their size allows."""
    assert [tokens for tokens, _ in ours] == [tokens for tokens, _ in expected]
    a, b = (torch.tensor([score for _, score in x], dtype=torch.double) for x in (ours, expected))
    torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


class Watch:
    """Looks at a cache whenever a step is about to read it, and spoils all that holds no token.

    `steps` has, for each: the tokens that are stored, the parents of those that go on, the copies,
    and the blocks in use.
    """

    def __init__(self, kv):
        self.kv, self.steps, self.parents, self.copies = kv, [], [], []
        self.fork, self.copy_blocks = kv.tables.fork, kv.copy_blocks
        kv.tables.fork, kv.copy_blocks = self.count_fork, self.count_copies

    def count_fork(self, parent, child):
        self.parents.append(parent)
        self.fork(parent, child)

    def count_copies(self, copies):
        self.copies += copies
        self.copy_blocks(copies)

    def attention(self, *arguments):
        tables = self.kv.tables
        tables.check_invariants()
        seq_ids = tables.seq_ids()
        blocks = {block for seq_id in seq_ids for block in tables.block_table(seq_id)}
        assert used(self.kv) == len(blocks)
        stored = tables.num_tokens(seq_ids[0])
        self.steps.append((stored, self.parents, self.copies, len(blocks)))
        self.parents, self.copies = [], []
        poison(self.kv, NAN)
        return in_place(*arguments)


# Beams: scores


@settings(max_examples=50, deadline=None)
@given(
    prompt=st.lists(st.integers(0, 8), min_size=1, max_size=9),
    num_beams=st.integers(1, 5),
    max_new_tokens=st.integers(1, 9),
    length_penalty=st.sampled_from([-1.0, 0.0, 0.5, 1.0, 3.0]),
    block_size=st.sampled_from([1, 3, 16]),
    model=st.sampled_from([brief(), brief(0), brief(std=1.0), brief(eos=None)]),
)
def test_beams_on_forked_tables_score_as_beams_that_are_computed_from_scratch(
    prompt, num_beams, max_new_tokens, length_penalty, block_size, model
):
    """And hold no more than the prompt's full blocks once, and the rest for each beam.

    Of siblings all but one copy their parent's last block, unless that is full.
    """
    kv = paged_cache(model, 100, block_size)
    watch = Watch(kv)
    asked = (prompt, num_beams, max_new_tokens, length_penalty)
    answers = beam_search(model, kv, *asked, watch.attention)
    assert_same_answers(answers, naive_beam_search(model, *asked))
    assert used(kv) == 0
    for stored, parents, copies, blocks in watch.steps:
        siblings = len(parents) - len(set(parents))
        assert len(copies) == (siblings if stored % block_size else 0)
        assert blocks <= group_blocks(len(prompt), stored + 1, num_beams, block_size)


def test_a_search_goes_on_while_the_worst_answer_may_be_beaten():
    """None of its beams could still beat the best one, from the second step on."""
    model = brief(std=1.0)
    ours = beam_search(model, paged_cache(model, 60, 3), [4], 3, 9)
    assert_same_answers(ours, naive_beam_search(model, [4], 3, 9))
    assert [len(tokens) for tokens, _ in ours] == [0, 9, 7]


TEXT = "It is a truth"


def test_the_small_gpt2_finds_the_same_sentences_as_from_scratch():
    prompt, kv = load_gpt2("tiny")[1].encode(TEXT).ids, paged_cache(tiny(), 40, 3)
    ours = beam_search(tiny(), kv, prompt, 4, 10, attention=Watch(kv).attention)
    assert_same_answers(ours, naive_beam_search(tiny(), prompt, 4, 10))


def by_transformers(model, prompt, num_beams, max_new_tokens, length_penalty, early_stopping):
    """Its answers, cut at the end of text, which has id 0, and scores."""
    out = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt)),
        num_beams=num_beams,
        num_return_sequences=num_beams,
        max_new_tokens=max_new_tokens,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    answers = [[*row[len(prompt) :].tolist(), 0] for row in out.sequences]
    answers = [tokens[: tokens.index(0)] for tokens in answers]
    return list(zip(answers, out.sequences_scores.tolist(), strict=True))


@cache
def theirs(model):
    """transformers' model with the weights of ours."""
    import transformers

    config = transformers.GPT2Config(
        n_layer=1, n_head=2, n_embd=8, vocab_size=9, n_positions=41, bos_token_id=0, eos_token_id=0
    )
    their_model = transformers.GPT2LMHeadModel(config).eval().requires_grad_(False).double()
    weights = {f"transformer.{name}": weight for name, weight in model.state_dict().items()}
    their_model.load_state_dict(weights | {"lm_head.weight": model.wte.weight})
    return their_model


@pytest.mark.parametrize("seed", [0, 2])
@pytest.mark.parametrize("length_penalty", [-1.0, 0.0, 1.0, 2.0])
def test_transformers_finds_the_same_where_it_is_told_never_to_stop_early(seed, length_penalty):
    """Its length counts the end-of-text token and not the prompt, as ours does."""
    model = brief(seed)
    for num_beams in (2, 4):
        asked = ([1, 2, 3], num_beams, 10, length_penalty)
        ours = beam_search(model, paged_cache(model, 60, 3), *asked)
        assert_same_answers(ours, by_transformers(theirs(model), *asked, "never"), 1e-4)


def test_transformers_finds_the_same_sentences_in_the_small_gpt2():
    prompt, kv = load_gpt2("tiny")[1].encode(TEXT).ids, paged_cache(tiny(), 100, 16)
    ours = beam_search(tiny(), kv, prompt, 4, 16)
    expected = by_transformers(reference(dtype=torch.float64), prompt, 4, 16, 1.0, "never")
    assert_same_answers(ours, expected, 1e-4)
    assert [len(tokens) for tokens, _ in ours] == [16] * 4


@pytest.mark.parametrize(("early_stopping", "second"), [(False, [4, 4]), (True, [4])])
def test_transformers_stops_before_the_best_is_found_by_its_default(early_stopping, second):
    """A longer answer, divided by its length, is better than the second one there."""
    asked = ([1, 2, 3], 2, 10, 1.0)
    first, ours = beam_search(brief(), paged_cache(brief(), 60, 3), *asked)
    assert (first[0], ours[0]) == ([], [4, 4, 1, 4, 4, 4])
    early = by_transformers(theirs(brief()), *asked, early_stopping)
    assert [tokens for tokens, _ in early] == [[], second]
    assert early[1][1] < ours[1]


@pytest.mark.parametrize("model", [brief(), brief(0), odd()])
def test_one_beam_is_greedy_if_length_earns_nothing(model):
    for seed in range(4):
        prompt, kv = random_tokens(3 + seed, seed, 9), paged_cache(model, 20, 3)
        ((tokens, _),) = beam_search(model, kv, prompt, 1, 12, length_penalty=0)
        assert [tokens] == generate(model, kv, [prompt], 12)


def test_a_score_is_the_sum_of_the_log_probabilities_over_the_length_to_a_power():
    """The second answer ends by itself: its end-of-text token counts in both."""
    prompt = [1, 2, 3]
    answers = beam_search(brief(), paged_cache(brief(), 60, 3), prompt, 2, 10, 0.5)
    for tokens, score in answers:
        text = [*prompt, *tokens, 0]
        log_probs = dense(brief(), text[:-1]).log_softmax(-1)[2:]
        total = sum(log_probs[i, token].item() for i, token in enumerate(text[3:]))
        assert score == pytest.approx(total / (len(tokens) + 1) ** 0.5)


def test_continuations_come_best_first_and_are_fewer_if_the_vocabulary_is_small():
    logits = torch.tensor([[1.0, 3.0, 2.0], [5.0, 0.0, 0.0]])
    sums = logits.log_softmax(-1) + torch.tensor([[-1.0], [-2.0]])
    best = list(best_first(logits, [-1.0, -2.0], 8))
    assert [(row, token) for _, row, token in best[:3]] == [(0, 1), (1, 0), (0, 2)]
    assert len(best) == 6
    assert all(total == pytest.approx(sums[row, token].item()) for total, row, token in best)


def test_a_search_in_which_every_beam_ends_stops():
    model = brief(vocab_size=1)
    assert beam_search(model, paged_cache(model, 4, 4), [0, 0], 3, 10) == [([], 0.0)]


# Beams: blocks


def test_the_dead_give_their_blocks_back_before_the_survivors_take_any():
    """3 beams of 6 tokens share block 0 of 4 and have one each, in a pool of 4: none is free.

    All survivors come from the second one. Two dead beams make room for two copies.
    Source: Kwon et al. 2023, section 4.4
    """
    tables = BlockTables(BlockAllocator(4), 4)
    tables.add("a", 5)
    for child in "bc":
        tables.fork("a", child)
    tables.append_all(dict.fromkeys("abc", 1))
    assert [tables.block_table(s) for s in "abc"] == [[0, 2], [0, 3], [0, 1]]
    replace_beams(tables, "abc", [("b", "d"), ("b", "e"), ("b", "f")])
    assert [tables.block_table(s) for s in tables.seq_ids()] == [[0, 3]] * 3
    assert tables.allocator.num_free == 2
    assert tables.append_all(dict.fromkeys("def", 1)) == [(3, 1), (3, 2)]
    tables.check_invariants()


def test_an_only_child_writes_where_its_parent_wrote():
    tables = BlockTables(BlockAllocator(2), 4)
    tables.add("a", 6)
    replace_beams(tables, ["a"], [("a", "b")])
    assert tables.append("b") == []
    assert (tables.seq_ids(), tables.block_table("b")) == (["b"], [0, 1])


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("prompt_length", [15, 16, 17])
def test_a_pool_as_large_as_the_most_blocks_in_use_is_enough_and_one_less_is_not(
    block_size, prompt_length
):
    model, prompt = odd(), random_tokens(prompt_length, 5, 53)
    kv = paged_cache(model, 200, block_size)
    watch = Watch(kv)
    expected = beam_search(model, kv, prompt, 4, 12, attention=watch.attention)
    most = max(blocks for *_, blocks in watch.steps)
    kv = paged_cache(model, most, block_size)
    assert beam_search(model, kv, prompt, 4, 12, attention=Watch(kv).attention) == expected
    kv = paged_cache(model, most - 1, block_size)
    with pytest.raises(OutOfBlocks, match=f"of {most - 1} are free"):
        beam_search(model, kv, prompt, 4, 12)
    assert used(kv) == 0
    kv.check_invariants()


def test_what_beams_have_in_common_is_stored_once_beyond_the_prompt():
    """4 beams of the small GPT-2, 40 tokens: the rule for samples allows 1 + 4 x 10 blocks."""
    prompt, kv = load_gpt2("tiny")[1].encode(TEXT).ids, paged_cache(tiny(), 100, 4)
    watch = Watch(kv)
    beam_search(tiny(), kv, prompt, 4, 41, 0.0, watch.attention)
    stored, *_, blocks = watch.steps[-1]
    assert (len(prompt), stored) == (4, 43)
    assert blocks < group_blocks(4, 44, 4, 4) / 2 == 20.5
    assert all(a[0] + 1 == b[0] for a, b in pairwise(watch.steps))


def test_the_same_search_leaves_the_same_free_list():
    lists = []
    for _ in range(2):
        kv = paged_cache(odd(), 60, 3)
        beam_search(odd(), kv, [1, 2, 3, 4], 4, 9)
        generate(odd(), kv, [[1, 2], [3]], 4, samples=2)
        lists.append(kv.tables.allocator._free_ids)
    assert lists[0] == lists[1]


# Errors


class Interrupted(Exception):
    pass


def interrupted_in_the_third_step():
    steps = iter(range(2))

    def attention(*arguments):
        if next(steps, None) is None:
            raise Interrupted
        return in_place(*arguments)

    return attention


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"prompt": []}, ValueError, "2 beams of 3 tokens, a prompt of 0"),
        ({"num_beams": 0}, ValueError, "0 beams of 3"),
        ({"max_new_tokens": 0}, ValueError, "2 beams of 0"),
        ({"num_beams": 2.0}, TypeError, "float"),
        ({"prompt": [1, 53]}, ValueError, r"\[53\] are outside a vocabulary of 53"),
        ({"max_new_tokens": 40}, ContextOverflow, "42 tokens to store, 41 positions"),
        ({"num_beams": 9, "max_new_tokens": 9}, OutOfBlocks, "of 8 are free"),
        ({"attention": "flash"}, ValueError, "attention is one of"),
        ({"length_penalty": NAN}, ValueError, "from -50 to 50, got nan"),
        ({"length_penalty": -400}, ValueError, "from -50 to 50, got -400"),
        ({"length_penalty": None}, TypeError, "NoneType"),
        ({"attention": interrupted_in_the_third_step(), "max_new_tokens": 9}, Interrupted, "^$"),
    ],
)
def test_a_search_that_fails_gives_back_its_blocks_and_leaves_others_alone(
    arguments, error, message
):
    kv = paged_cache(odd(), 8, 4)
    generate_first(kv, [1, 2, 3, 4, 5])
    before = snapshot(kv)[2]
    with pytest.raises(error, match=message):
        beam_search(
            odd(), kv, **{"prompt": [7, 8, 9], "num_beams": 2, "max_new_tokens": 3} | arguments
        )
    assert snapshot(kv)[2] == before
    kv.check_invariants()
    (logits,) = forward_paged_decode(odd(), kv, ["other"], [6])
    torch.testing.assert_close(logits, dense(odd(), [1, 2, 3, 4, 5, 6])[-1])


def test_a_search_that_is_interrupted_between_two_forks_gives_back_its_blocks(monkeypatch):
    kv, fork = paged_cache(odd(), 20, 4), BlockTables.fork

    def fork_one(tables, parent, child):
        if len(tables.seq_ids()) == 2:
            raise Interrupted
        fork(tables, parent, child)

    monkeypatch.setattr(BlockTables, "fork", fork_one)
    with pytest.raises(Interrupted):
        beam_search(odd(), kv, [7, 8, 9], 3, 4)
    assert used(kv) == 0


def test_a_sequence_that_comes_during_a_search_stays():
    kv = paged_cache(odd(), 20, 4)

    def attention(*arguments):
        if "guest" not in kv.tables.seq_ids():
            kv.tables.add("guest", 5)
        return in_place(*arguments)

    beam_search(odd(), kv, [7, 8, 9], 3, 4, attention=attention)
    assert (kv.tables.seq_ids(), used(kv)) == (["guest"], 2)


@pytest.mark.parametrize("length_penalty", [-50, 50])
def test_the_largest_length_penalties_leave_scores_that_are_numbers(length_penalty):
    """Powers that go much further are 0 or infinite from some length on."""
    for _, score in beam_search(brief(), paged_cache(brief(), 60, 3), [1], 3, 30, length_penalty):
        assert isinstance(score, float) and -torch.inf < score < 0


def generate_first(kv, tokens):
    kv.tables.add("other")
    for token in tokens:
        forward_paged_decode(odd(), kv, ["other"], [token])


# Samples


@pytest.mark.parametrize(("prompt_length", "copies"), [(8, 0), (9, 3)])
def test_b1_four_samples_of_one_prompt_in_blocks_of_four(prompt_length, copies):
    """A prompt of 8 ends on a boundary; of 9 it fills a block with 1 token, and all but one copy.

    6 blocks are in use either way. The prompt is computed once, and its logits choose all four
    first tokens. Source: vllm-project/vllm tests (n samples, append slots); TensorRT-LLM PR #14945
    """
    model, prompt = odd(), random_tokens(prompt_length, 1, 53)
    kv, choose, draw = paged_cache(model, 10, 4), sampler(5.0, seed=1), []

    def seen(logits, rows, step):
        draw.append(logits)
        return choose(logits, rows, step)

    watch = Watch(kv)
    answers = generate(model, kv, [prompt], 4, seen, watch.attention, samples=4)
    assert [(len(c), blocks) for _, _, c, blocks in watch.steps] == [(copies, 6), (0, 6), (0, 6)]
    assert len({id(parent) for parent in watch.steps[0][1]}) == 1
    assert torch.equal(draw[0], draw[0][:1].expand(4, -1))
    assert len(set(map(tuple, answers))) == 4
    for row, answer in enumerate(answers):
        for step, token in enumerate(answer):
            logits = dense(model, prompt + answer[:step])[-1:]
            assert choose(logits, [row], step) == [token]


def test_b1_a_sample_that_ends_gives_back_its_own_blocks_only():
    """2 shared blocks and one for each of four; then one after another ends."""
    kv, ends = paged_cache(odd(eos_token_id=0), 10, 4), {0: 1, 1: 3, 2: 2, 3: 9}
    watch = Watch(kv)

    def choose(logits, rows, step):
        return [0 if step == ends[row] else 1 + row for row in rows]

    answers = generate(odd(eos_token_id=0), kv, [[5] * 8], 5, choose, watch.attention, samples=4)
    assert [blocks for *_, blocks in watch.steps] == [6, 5, 4, 3]
    assert answers == [[1], [2, 2, 2], [3, 3], [4] * 5]
    assert used(kv) == 0


def test_samples_of_several_prompts_stand_one_after_another():
    prompts = [random_tokens(n, n, 53) for n in (3, 9)]
    kv = paged_cache(odd(), 40, 4)
    answers = generate(odd(), kv, prompts, 5, greedy, samples=3)
    texts = [dense_greedy(odd(), prompt, 5)[len(prompt) :] for prompt in prompts]
    assert answers == [texts[0]] * 3 + [texts[1]] * 3
    assert texts[0][0] != texts[1][0]  # a row of the other prompt would be seen at once


@pytest.mark.parametrize(
    ("samples", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError)]
)
def test_a_number_of_samples_that_cannot_be_is_refused(samples, error):
    kv = paged_cache(odd(), 4, 4)
    with pytest.raises(error, match=str(samples) if error is ValueError else "float"):
        generate(odd(), kv, [[1, 2]], 3, samples=samples)
    assert used(kv) == 0


def test_samples_that_run_out_of_blocks_give_all_of_them_back():
    """Three samples of a prompt of 6 need 2 copies of its second block; 1 block is free."""
    kv = paged_cache(odd(), 3, 4)
    with pytest.raises(OutOfBlocks, match="need 2 blocks, 1 of 3 are free"):
        generate(odd(), kv, [[1] * 6], 2, samples=3)
    assert used(kv) == 0


def test_a_beam_is_its_own_name_however_alike_two_are():
    assert len({Beam(-1.0, [3]), Beam(-1.0, [3])}) == 2
