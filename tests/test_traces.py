"""Reading traces: small files written here, and the real ones where LABCORE_TRACES names them."""

import json
import os
from pathlib import Path

import pytest

from labcore.admission import paged
from labcore.simulator import simulate
from labcore.traces import NO_OUTPUT, TOO_LONG, TraceError, read_trace

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
    (HEADER + "2023-11-16 10:00:00.x,5,1\n", "line 2: .*'x'"),
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
        (mooncake(output_length=None), "NoneType"),
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
