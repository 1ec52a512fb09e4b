"""Reading traces: small files written here, and the real ones where LABCORE_TRACES names them."""

import importlib.util
import json
import os
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from bookkit.engine_log import read_engine_log
from bookkit.quantiles import TABLES, draw_quantiles, quantiles
from bookkit.traces import NO_OUTPUT, TOO_LONG, TraceError, block_keys, read_trace
from labcore.admission import paged
from labcore.simulator import simulate

BENCHMARK = Path(__file__).resolve().parent.parent / "benchmarks" / "traces.py"
spec = importlib.util.spec_from_file_location("benchmark_traces", BENCHMARK)
tables = importlib.util.module_from_spec(spec)
spec.loader.exec_module(tables)

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"
REAL = Path(os.environ.get("LABCORE_TRACES", ""))
AZURE = REAL / "azure2023"
MOONCAKE = REAL / "mooncake" / "conversation_trace.jsonl"
ENGINE_LOG = REAL / "vllm-rtx4090" / "RTX4090_Llama-3.1-8B_requests.jsonl"
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
    for hash_block_size in (0, -512):
        with pytest.raises(ValueError, match=f"do not divide one of {hash_block_size}"):
            block_keys((7,), 512, 16, hash_block_size)


def test_a_block_of_hashes_holds_at_least_one_token(write):
    """Source: kvcache-ai/Mooncake trace format"""
    with pytest.raises(ValueError, match="at least 1 token, got 0"):
        read_trace(write(mooncake(), "t.jsonl"), hash_block_size=0)


def test_milliseconds_become_seconds_and_ids_follow_their_request(write):
    text = mooncake(timestamp=3000, hash_ids=[7, 8]) + mooncake(timestamp=1500, hash_ids=[7, 9])
    trace = read_trace(write(text, "t.jsonl"))
    assert trace.arrivals.tolist() == [0, 1.5]
    assert trace.prefix_ids == ((7, 9), (7, 8))


def test_a_time_may_have_a_zone(write):
    """Source: the 2024 Azure traces write 2024-05-10 00:00:00.009930+00:00."""
    rows = ["00:00:00.009930+00:00", "02:00:00.5+02:00", "00:00:01Z", "00:00:02"]
    text = HEADER + "".join(f"2024-05-10 {row},5,1\n" for row in rows)
    assert read_trace(write(text)).arrivals.tolist() == [0, 0.49007, 0.99007, 1.99007]


def test_a_comma_before_the_fraction_of_a_second_is_read_as_a_point_is(write):
    """Source: ISO 8601 and Python's fromisoformat, which take both; logging writes a comma."""
    rows = ['"2023-11-16 18:15:46,250"', '"2023-11-16 18:15:46,6805900"', "2023-11-16 18:15:47.5"]
    trace = read_trace(write(HEADER + "".join(f"{when},5,1\n" for when in rows)))
    assert trace.arrivals.tolist() == [0, 0.43059, 1.25]


def test_prefixes_are_unknown_unless_every_row_tells_them(write):
    trace = read_trace(write(mooncake(hash_ids=[7, 8]) + mooncake(), "t.jsonl"))
    assert trace.prefix_ids is None


BAD_ROWS = [
    ("TIMESTAMP,ContextTokens\n2023-11-16 10:00:00,5\n", "line 2: no column 'GeneratedTokens'"),
    ("a,b\n1,2\n", "line 2: no column 'TIMESTAMP' or 'timestamp', only a, b"),
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
        (
            '{"TIMESTAMP": 5, "ContextTokens": 5, "GeneratedTokens": 1}',
            "TIMESTAMP: expected a date and a time, got 5",
        ),
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


def test_rows_that_are_set_aside_take_no_memory(write):
    """So memory grows with the requests, not with the size of the file."""
    peaks = []
    for rows in (2_000, 8_000):
        path = write(HEADER + "2023-11-16 10:00:00,5,0\n" * rows)
        tracemalloc.start()
        assert read_trace(path).set_aside[NO_OUTPUT] == rows
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < peaks[0] + 20_000  # the second file is 144,000 bytes longer


def test_a_run_says_what_it_refuses_and_a_larger_context_and_budget_let_it_in(write):
    lengths = [(500, 20), (3_000, 100), (14_000, 100)]
    rows = "".join(f"2023-11-16 10:00:00,{p},{o}\n" for p, o in lengths)
    trace = read_trace(write(HEADER + rows), max_context=None)
    small = simulate(paged, trace, 8_192)
    assert small.refusals == {
        1: "a prompt of 3000 tokens leaves no room in a context of 1024",
        2: "a prompt of 14000 tokens leaves no room in a context of 1024",
    }
    assert simulate(paged, trace, 8_192, max_context=16_384).refusals == {
        2: "needs 907 blocks, the pool has 512"
    }
    assert simulate(paged, trace, 16_384, max_context=16_384).finished == 3


SERVED = {
    "input_toks": 8,
    "output_toks": 3,
    "arrival_time": 1_000.0,
    "queued_ts": 50.0,
    "scheduled_ts": 50.5,
    "first_token_ts": 51.0,
    "last_token_ts": 53.0,
}
SERIES = "t,prompt_throughput,gen_throughput,running,waiting,kv_cache_pct\n"
SECOND = "1.0,8.0,1.0,2,1,37.5\n"


@pytest.fixture
def write_log(write):
    def write_files(rows, series=SERIES + SECOND):
        write(series, "gpu_timeseries.csv")
        return write("".join(json.dumps(SERVED | row) + "\n" for row in rows), "gpu_requests.jsonl")

    return write_files


def test_an_engines_log_has_its_requests_and_its_seconds(write_log):
    later = {"input_toks": 9, "arrival_time": 1_002.0, "queued_ts": 52.1, "scheduled_ts": 52.5}
    later |= {"first_token_ts": 52.75, "last_token_ts": 54.0}
    log = read_engine_log(write_log([later, {}], SERIES + SECOND + "2.0,0,2.0,1,0,100\n"))
    assert [tuple(request) for request in log.workload] == [(8, 3, 0.0), (9, 3, 2.0)]
    assert log.scheduled.tolist() == [0.5, 2.5]
    assert log.first_token.tolist() == [1.0, 2.75]
    assert log.last_token.tolist() == [3.0, 4.0]
    assert log.seconds.tolist() == [1.0, 2.0]
    assert (log.running.tolist(), log.waiting.tolist()) == ([2, 1], [1, 0])
    assert log.kv_use.tolist() == [0.375, 1.0]


def test_two_clocks_are_set_by_the_request_that_waits_the_least_to_be_queued(write_log):
    slow = {"arrival_time": 999.0, "queued_ts": 49.25, "scheduled_ts": 49.5}
    log = read_engine_log(write_log([slow, {}]))
    assert log.workload.arrivals.tolist() == [0, 1]
    assert log.scheduled.tolist() == [0.5, 1.5]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"output_toks": 0}, "at least 1, got 0"),
        ({"input_toks": "many"}, "got 'many'"),
        ({"arrival_time": -1.0}, "at least 0, got -1.0"),
        ({"arrival_time": "noon"}, "'noon'"),
        ({"queued_ts": None}, "queued_ts: expected a number, at least 0, got None"),
        ({"queued_ts": True}, "got True"),
        ({"last_token_ts": float("inf")}, "got inf"),
        ({"last_token_ts": 50.75}, "in this order of time, got [50.0, 50.5, 51.0, 50.75]"),
        ({"scheduled_ts": 49.0}, "in this order of time"),
    ],
    ids=str,
)
def test_a_bad_request_of_an_engine_stops_the_reading_with_file_and_line(write_log, row, message):
    with pytest.raises(TraceError, match=r"gpu_requests\.jsonl, line 2: ") as caught:
        read_engine_log(write_log([{}, row]))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        (SERIES + SECOND + "2.0,8.0,1.0,two,1,37.5\n", ", line 3: .*'two'"),
        (SERIES + "1.0,8.0,1.0,-2,1,37.5\n", ", line 2: .*'-2'"),
        (SERIES + "1.0,8.0,1.0,2,1,101\n", ", line 2: .*at most 100% full, got 101"),
        (SERIES + "1.0,8.0,1.0,2,1\n", ", line 2"),
        (SERIES + "1.0,8.0,1.0,2,1,37.5,4\n", ", line 2: 1 more values"),
        ("t,running,waiting\n1.0,2,1\n", ", line 2: no column 'kv_cache_pct'"),
        (SERIES + SECOND + SECOND, ", row 2: t = 1.0 comes after t = 1.0"),
        (SERIES, ": no rows"),
    ],
)
def test_a_bad_second_of_an_engine_stops_the_reading_with_file_and_line(write_log, series, message):
    with pytest.raises(TraceError, match=r"gpu_timeseries\.csv" + message):
        read_engine_log(write_log([{}], series))


def test_a_log_without_requests_or_without_its_series_is_refused(write_log, tmp_path):
    path = write_log([])
    with pytest.raises(TraceError, match=r"gpu_requests\.jsonl: no rows"):
        read_engine_log(path)
    alone = write_log([{}]).rename(tmp_path / "cpu_requests.jsonl")
    with pytest.raises(FileNotFoundError, match="cpu_timeseries"):
        read_engine_log(alone)
    with pytest.raises(TraceError, match=r"log\.jsonl: an engine's log is a NAME_requests"):
        read_engine_log(tmp_path / "log.jsonl")


def test_a_log_that_is_no_text_is_refused_by_name(write_log):
    path = write_log([{}])
    path.write_bytes(b"\x1f\x8b\x08\x00")
    with pytest.raises(TraceError, match=r"gpu_requests\.jsonl: not a text file"):
        read_engine_log(path)


@pytest.mark.skipif(not ENGINE_LOG.is_file(), reason="LABCORE_TRACES holds no engine's log")
def test_a_real_engines_log_is_read_whole():
    """An RTX 4090 under vLLM 0.19: 32.3 running and 92.7% of the cache in use on the mean."""
    log = read_engine_log(ENGINE_LOG)
    assert len(log.workload) == 300
    assert round(log.workload.prompts.mean()) == 857
    assert round(log.workload.outputs.mean()) == 653
    assert log.running.mean() == pytest.approx(32.3, abs=0.05)
    assert log.kv_use.mean() == pytest.approx(0.927, abs=0.0005)
    assert log.last_token.max() == pytest.approx(183.6, abs=0.05)
    assert (log.workload.arrivals <= log.scheduled + 1e-6).all()


@needs_traces
def test_the_shipped_tables_are_those_of_the_traces():
    assert tables.tables() == json.loads(TABLES.read_text(encoding="utf-8"))


RESULTS = json.loads(tables.RESULT.read_text(encoding="utf-8"))["runs"]


@needs_traces
@pytest.mark.parametrize("run", RESULTS, ids=lambda run: f"{run['trace']}, {run['max_context']}")
def test_the_recorded_figures_are_those_of_the_traces(run):
    context = run["max_context"]
    assert tables.figures(tables.real(run["trace"], context), context) == run["real"]


@pytest.mark.parametrize("run", RESULTS, ids=lambda run: f"{run['trace']}, {run['max_context']}")
def test_a_workload_from_ten_bands_fills_a_server_as_its_trace_does(run):
    """Means of ten draws of as many requests as the trace has."""
    fitted, real = run["ten bands"], run["real"]
    assert fitted["utilization"] == pytest.approx(real["utilization"], abs=0.001)
    assert fitted["mean_resident"] == pytest.approx(real["mean_resident"], rel=0.03)
    assert fitted["steps"] == pytest.approx(real["steps"], rel=0.05)
    assert fitted["too_long"] == pytest.approx(real["too_long"], abs=0.015)


@needs_traces
def test_one_band_misses_what_a_short_context_makes_of_the_azure_conversations():
    """A correlation of 0.09 in logs, and more than twice the steps when the two are drawn apart."""
    trace = tables.real("azure_conv")
    assert np.corrcoef(np.log(trace.prompts), np.log(trace.outputs))[0, 1] < 0.1
    steps = {}
    for bands in (1, 10):
        fitted = draw_quantiles(quantiles(trace, bands), len(trace), max_context=1_024)
        steps[bands] = tables.figures(fitted, 1_024)["steps"]
    real = RESULTS[0]["real"]["steps"]
    assert steps[1] > 2 * real
    assert steps[10] == pytest.approx(real, rel=0.05)
