"""Reading traces: small files written here, and the real ones where LABCORE_TRACES names them."""

import json
import os
from pathlib import Path

import pytest

from labcore.admission import paged
from labcore.simulator import simulate
from labcore.traces import NO_OUTPUT, TOO_LONG, TraceError, block_keys, read_trace

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
REAL = Path(os.environ.get("LABCORE_TRACES", ""))
AZURE = REAL / "azure2023"
MOONCAKE = REAL / "mooncake" / "conversation_trace.jsonl"
needs_traces = pytest.mark.skipif(
    not (AZURE.is_dir() and MOONCAKE.is_file() and str(REAL) != "."),
    reason="LABCORE_TRACES names no folder with the Azure and Mooncake traces",
)


@pytest.fixture
def write(tmp_path):
    def write_file(text, name="trace.csv"):
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return write_file


def mooncake(**row):
    return json.dumps({"timestamp": 0, "input_length": 600, "output_length": 5} | row) + "\n"


def test_seven_digits_of_a_second_are_read_and_the_first_arrival_is_zero(write):
    """Source: Azure/AzurePublicDataset #53 and its trace files"""
    trace = read_trace(
        write(HEADER + "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n")
    )
    assert trace.prompts.tolist() == [374, 396]
    assert trace.outputs.tolist() == [44, 109]
    assert trace.arrivals.tolist() == [0, pytest.approx(4.3145790, abs=1e-7)]
    assert trace.prefix_ids is None


def test_the_seventh_digit_decides_the_order(write):
    rows = "2023-11-16 18:15:46.0000002,2,1\n2023-11-16 18:15:46.0000001,1,1\n"
    assert read_trace(write(HEADER + rows)).prompts.tolist() == [1, 2]


def test_ties_keep_the_order_of_the_file_and_late_rows_are_sorted_with_a_note(write):
    """Source: Azure/AzurePublicDataset #53"""
    rows = [("10:00:02", 1), ("10:00:02", 2), ("10:00:01", 3), ("10:00:02", 4)]
    text = HEADER + "".join(f"2023-11-16 {when},{prompt},1\n" for when, prompt in rows)
    trace = read_trace(write(text))
    assert trace.prompts.tolist() == [3, 1, 2, 4]
    assert trace.arrivals.tolist() == [0, 1, 1, 1]
    assert trace.notes == ("1 out of order, sorted by arrival",)
    assert "sorted by arrival" in str(trace)


def test_rows_that_are_no_request_for_this_server_are_counted(write):
    rows = "".join(f"2023-11-16 10:00:00,{p},{o}\n" for p, o in [(5, 0), (1000, 25), (1000, 24)])
    trace = read_trace(write(HEADER + rows))
    assert trace.set_aside == {NO_OUTPUT: 1, TOO_LONG: 1}
    assert trace.prompts.tolist() == [1000]
    assert str(trace) == (
        "trace.csv: 1 requests; 1 row set aside: no output; "
        "1 row set aside: longer than the context"
    )
    everything = read_trace(write(HEADER + rows), max_context=None)
    assert len(everything) == 2
    assert everything.set_aside[TOO_LONG] == 0


def test_an_empty_trace_has_no_requests(write):
    assert len(read_trace(write(HEADER))) == 0
    assert len(read_trace(write("", "trace.jsonl"))) == 0


@pytest.mark.parametrize(
    ("length", "ids", "fits"), [(20, 2, False), (512, 1, True), (513, 1, False), (513, 2, True)]
)
def test_the_ids_of_a_prompts_blocks_fit_its_length(write, length, ids, fits):
    """Source: vllm-project/guidellm #948; ai-dynamo/aiperf #581; ai-dynamo #8998, #10095"""
    good = mooncake(hash_ids=[0, 1])
    path = write(good + mooncake(input_length=length, hash_ids=list(range(ids))), "t.jsonl")
    if fits:
        assert len(read_trace(path).prefix_ids[1]) == ids
    else:
        with pytest.raises(
            TraceError, match=rf"t.jsonl, line 2: {ids} hash_ids, .* {length} tokens"
        ):
            read_trace(path)


def test_an_id_of_a_trace_stands_for_several_of_our_blocks_and_only_full_ones():
    """Source: kvcache-ai/Mooncake trace format; ai-dynamo #8998"""
    assert block_keys((7,), 512, 16) == [(7, k) for k in range(32)]
    assert block_keys((7, 9), 513 + 16, 16)[-2:] == [(7, 31), (9, 0)]
    assert block_keys((7,), 3, 4) == []
    for block_size in (0, 3, 784):
        with pytest.raises(ValueError, match=f"blocks of {block_size} tokens do not divide"):
            block_keys((7,), 512, block_size)


def test_a_block_of_hashes_holds_at_least_one_token(write):
    """Source: kvcache-ai/Mooncake trace format"""
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        read_trace(write(mooncake(), "t.jsonl"), hash_block_size=0)


def test_milliseconds_become_seconds_and_ids_follow_their_request(write):
    text = mooncake(timestamp=3000, hash_ids=[7, 8]) + mooncake(timestamp=1500, hash_ids=[7, 9])
    trace = read_trace(write(text, "t.jsonl"))
    assert trace.arrivals.tolist() == [0, 1.5]
    assert trace.prefix_ids == ((7, 9), (7, 8))


def test_prefixes_are_unknown_unless_every_row_tells_them(write):
    trace = read_trace(write(mooncake(hash_ids=[7, 8]) + mooncake(), "t.jsonl"))
    assert trace.prefix_ids is None


BAD_ROWS = [
    ("TIMESTAMP,ContextTokens\n2023-11-16 10:00:00,5\n", "line 2: no column 'GeneratedTokens'"),
    ("a,b\n1,2\n", "line 2: no column 'timestamp'"),
    (HEADER + "2023-11-16 10:00:00,5,1\n2023-11-16 10:00:00,many,1\n", "line 3: .*'many'"),
    (HEADER + "2023-11-16 10:00:00,-5,1\n", "line 2: .*at least 1, got '-5'"),
    (HEADER + "2023-11-16 10:00:00,0,1\n", "line 2: .*at least 1, got '0'"),
    (HEADER + "2023-11-16 10:00:00,5,-1\n", "line 2: .*at least 0, got '-1'"),
    (HEADER + "2023-11-16 10:00:00,5.5,1\n", "line 2: .*5.5"),
    (HEADER + "2023-11-16 10:00:00,5\n", "line 2"),
    (HEADER + "2023-11-16 10:00:00,5,\n", "line 2"),
    (HEADER + "yesterday,5,1\n", "line 2: .*yesterday"),
    (HEADER + "2023-11-16 10:00:00.x,5,1\n", "line 2: .*00.x'"),
    (HEADER + "2023-11-16 10:00:00.-5,5,1\n", "line 2: .*00.-5'"),
    (HEADER + "2023-11-16 10:00:00,1,155,44\n", "line 2: 1 more values than columns"),
    (HEADER + "2023-11-16 10:00:00,1_000,1\n", "line 2: .*'1_000'"),
    ("ContextTokens,GeneratedTokens,TIMESTAMP\n5,1\n", "line 2: .*None"),
    (HEADER + '"' + "2023-11-16 10:00:00,5,1\n" * 6_000, "line .*field limit"),
]


@pytest.mark.parametrize(("text", "message"), BAD_ROWS)
def test_a_row_that_cannot_be_stops_the_reading_with_file_and_line(write, text, message):
    with pytest.raises(TraceError, match=f"trace.csv, {message}"):
        read_trace(write(text))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1, 2]", "expected an object"),
        (mooncake(input_length=2.5), "got 2.5"),
        (mooncake(output_length=None), "got None"),
        (mooncake(input_length=0), "at least 1, got 0"),
        (mooncake(input_length=True), "got True"),
        (mooncake(input_length=2**63), "got 9223372036854775808"),
        (mooncake(timestamp=float("nan")), "got nan"),
        (mooncake(timestamp=float("inf")), "got inf"),
        (mooncake(timestamp="inf"), "got 'inf'"),
        (mooncake(timestamp=10**400), "too large"),
        (mooncake(hash_ids="ab"), "list of whole numbers, got 'ab'"),
        (mooncake(hash_ids=[None, "x"]), "list of whole numbers"),
        ('{"timestamp": 0, "input_length": ' + "9" * 5000, "4300 digits"),
        ('{"TIMESTAMP": 5, "ContextTokens": 5, "GeneratedTokens": 1}', "'5'"),
        (mooncake(timestamp="soon"), "'soon'"),
        (mooncake(hash_ids=3), "line 2"),
        ('{"timestamp": 0, "input_length": 5}', "no column 'output_length'"),
    ],
)
def test_a_bad_line_of_json_stops_the_reading_with_file_and_line(write, line, message):
    with pytest.raises(TraceError, match=r"t\.jsonl, line 2: ") as caught:
        read_trace(write(mooncake() + line, "t.jsonl"))
    assert message in str(caught.value)


def test_other_files_are_refused(write, tmp_path):
    with pytest.raises(TraceError, match=r"t\.txt: a trace is"):
        read_trace(write("", "t.txt"))
    with pytest.raises(FileNotFoundError):
        read_trace(tmp_path / "nothing.csv")


@needs_traces
@pytest.mark.parametrize(
    ("name", "rows", "mean_prompt", "mean_output"),
    [("conv", 19_366, 1155, 211), ("code", 8_819, 2048, 28)],
)
def test_the_azure_traces_are_read_whole(name, rows, mean_prompt, mean_output):
    trace = read_trace(AZURE / f"AzureLLMInferenceTrace_{name}.csv", max_context=None)
    assert len(trace) == rows
    assert round(trace.prompts.mean()) == mean_prompt
    assert round(trace.outputs.mean()) == mean_output
    assert trace.arrivals[0] == 0 == trace.arrivals.min()


@needs_traces
def test_more_than_half_of_the_azure_conversations_pass_1024_tokens():
    trace = read_trace(AZURE / "AzureLLMInferenceTrace_conv.csv")
    assert len(trace) + trace.set_aside[TOO_LONG] == 19_366
    assert trace.set_aside[TOO_LONG] / 19_366 == pytest.approx(0.58, abs=0.005)


@needs_traces
def test_every_id_of_the_mooncake_trace_stands_for_512_tokens():
    trace = read_trace(MOONCAKE, max_context=None)
    assert len(trace) == 12_031
    pairs = zip(trace.prompts.tolist(), trace.prefix_ids, strict=True)
    assert all(len(ids) == -(-prompt // 512) for prompt, ids in pairs)


@needs_traces
def test_the_simulator_runs_on_a_real_trace():
    trace = read_trace(AZURE / "AzureLLMInferenceTrace_conv.csv")
    result = simulate(paged, trace, watermark=0.05)
    assert result.finished == len(trace)
    assert result.refused == 0
    assert result.output_tokens == trace.outputs.sum()
    assert 0.97 < result.utilization < 0.99


def test_a_byte_order_mark_line_ends_of_windows_and_empty_lines_do_no_harm(write):
    """Mutant: encoding="utf-8" (found by nobody), a line of spaces taken for JSON."""
    rows = "\ufeff" + HEADER + "\n2023-11-16 10:00:00,5,1\n\n2023-11-16 10:00:01,6,2\n"
    path = write("")
    path.write_bytes(rows.replace("\n", "\r\n").encode())
    assert [tuple(r) for r in read_trace(path)] == [(5, 1, 0.0), (6, 2, 1.0)]
    lines = "\ufeff" + mooncake() + "\n  \n" + mooncake(input_length=7)
    assert read_trace(write(lines, "t.jsonl")).prompts.tolist() == [600, 7]


def test_the_line_is_counted_from_one_and_empty_lines_count(write):
    with pytest.raises(TraceError, match=r"t\.jsonl, line 3: not JSON"):
        read_trace(write(mooncake() + "\n{", "t.jsonl"))


def test_ties_are_not_sorted_by_length_and_no_row_is_moved_without_a_note(write):
    """Source: Azure/AzurePublicDataset #53"""
    rows = "".join(f"2023-11-16 10:00:00,{p},{o}\n" for p, o in [(9, 1), (3, 7), (3, 2), (9, 9)])
    trace = read_trace(write(HEADER + rows))
    assert [(r.prompt, r.output) for r in trace] == [(9, 1), (3, 7), (3, 2), (9, 9)]
    assert trace.notes == ()


def test_a_fraction_may_have_any_number_of_digits(write):
    rows = "2023-11-16 10:00:00,1,1\n2023-11-16 10:00:00.25,2,1\n2023-11-16 10:00:00.5000,3,1\n"
    assert read_trace(write(HEADER + rows)).arrivals.tolist() == [0, 0.25, 0.5]


def test_neighbours_in_the_seventh_digit_stay_apart(write):
    """Source: Azure/AzurePublicDataset #53 (one float of seconds since 2000 has steps of 1.2e-7)"""
    rows = [("0000004", 2), ("0000003", 1)]
    text = HEADER + "".join(f"2023-11-16 18:15:46.{digits},{p},1\n" for digits, p in rows)
    trace = read_trace(write(text))
    assert trace.prompts.tolist() == [1, 2]
    assert trace.arrivals.tolist() == [0, pytest.approx(1e-7, rel=1e-6)]
    assert trace.notes == ("1 out of order, sorted by arrival",)


def test_a_file_that_is_no_text_is_refused_by_name(write):
    path = write("")
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(TraceError, match=r"trace\.csv: not a text file"):
        read_trace(path)


def test_rows_of_json_without_output_are_counted_too(write):
    trace = read_trace(write(mooncake(output_length=0) + mooncake(output_length=425), "t.jsonl"))
    assert trace.set_aside == {NO_OUTPUT: 1, TOO_LONG: 1}
    assert len(trace) == 0
