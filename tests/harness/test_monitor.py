"""The monitor: NVML readings around a run, a health URL polled beside it."""

from __future__ import annotations

import argparse
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from pyharness.base import errors
from pyharness.device import monitor
from pyharness.device.monitor import FIELDS, Monitor, Reading
from pyharness.perf import perf
from pyharness.receipts import pages, show, statement


def reading(memory: int = 1000, reasons: int = 0, others: int | None = 0) -> Reading:
    return (memory, 1980, 3201, 700_000, 60, 99, reasons, others)


class Gpu:
    """Readings of a GPU whose memory, clocks and neighbours a test sets."""

    def __init__(self) -> None:
        self.now = reading()
        self.delay = 0.0
        self.dead = False

    def read(self) -> Reading:
        time.sleep(self.delay)
        if self.dead:
            raise errors.Environment("NVML: the GPU stopped answering")
        return self.now


def test_readings_come_ten_times_a_second_and_bracket_the_run() -> None:
    gpu = Gpu()
    with Monitor(gpu.read) as watch:
        first = watch.baseline
        time.sleep(0.55)
    device = watch.report()["device"]
    assert first == 1000  # taken before the run's first statement
    assert device["fields"] == list(FIELDS)
    assert 6 <= device["sampled"] <= 9
    assert device["period_ms"] == 100
    assert device["covers_run"] is True
    assert device["peak_memory_bytes"] == 1000
    assert watch.report()["device_reason"] == ""


def test_the_peak_is_the_most_of_all_readings_and_of_a_stretch() -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=0.01) as watch:
        begin = watch.mark()
        gpu.now = reading(5000)
        watch.sample()
        end = watch.mark()
        gpu.now = reading(9000)
        time.sleep(0.1)
        assert watch.peak(begin, end) in (5000, 9000)  # the reading after the stretch counts too
        assert watch.latest == 9000
    assert watch.peak() == 9000
    assert watch.baseline == 1000


def test_readings_that_do_not_cover_the_run_make_the_peak_unknown() -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=0.01) as watch:
        gpu.delay = 0.15  # longer than ten periods
        time.sleep(0.05)
    device = watch.report()["device"]
    assert device["covers_run"] is False
    assert device["peak_memory_bytes"] == "unknown"
    assert watch.peak() is None


def test_a_gpu_that_stops_answering_is_recorded() -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=0.01) as watch:
        time.sleep(0.03)
        gpu.dead = True
    device = watch.report()["device"]
    assert device["errors"] == ["NVML: the GPU stopped answering"]
    assert device["covers_run"] is False
    assert device["peak_memory_bytes"] == "unknown"


def test_a_gpu_that_never_answers_is_null_with_the_reason() -> None:
    gpu = Gpu()
    gpu.dead = True
    with Monitor(gpu.read) as watch:
        pass
    assert watch.report() == {"device": None, "device_reason": "NVML: the GPU stopped answering", "health": None}


CALM = "not throttled, not power-capped"


@pytest.mark.parametrize(
    ("bits", "names", "throttled", "words"),
    [
        (0, [], False, CALM),
        (1, ["idle"], False, CALM),
        (4, ["software power cap"], False, "not throttled, power-capped in 1 of 4 readings (25.0 %)"),
        (8, ["hardware slowdown"], True, "throttled by the hardware in 1 of 4 readings (25.0 %)"),
        (32, ["software thermal slowdown"], True, "thermally throttled in 1 of 4 readings (25.0 %)"),
        (
            4 | 32 | 64,
            ["software power cap", "software thermal slowdown", "hardware thermal slowdown"],
            True,
            "thermally throttled in 1 of 4 readings (25.0 %), power-capped in 1 of 4 readings (25.0 %)",
        ),
        (128, ["power brake"], True, "throttled by the hardware in 1 of 4 readings (25.0 %)"),
    ],
)
def test_what_limits_the_clocks(bits: int, names: list[str], throttled: bool, words: str) -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=60) as watch:
        gpu.now = reading(reasons=bits)
        watch.sample()
        gpu.now = reading()
        watch.sample()
    device = watch.report()["device"]
    assert device["reasons"] == names
    assert device["throttled"] is throttled is watch.throttled
    assert monitor.clocks(device) == words
    assert not list(monitor.contradictions(device))
    del device["limited"]  # as in older receipts
    assert monitor.clocks(device) == words
    assert not list(monitor.contradictions(device))


def test_a_gpu_that_names_no_limits_is_not_called_calm() -> None:
    with Monitor(lambda: (*reading()[:6], None, 0), period=60) as watch:
        pass
    assert monitor.clocks(watch.report()["device"]) == "throttling not reported"


def test_a_long_run_counts_every_reading_and_not_only_those_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "KEPT", 10)
    gpu = Gpu()
    with Monitor(gpu.read, period=60) as watch:
        for i in range(98):
            gpu.now = reading(memory=i % 7, reasons=4 if i < 50 else 0)
            watch.sample()
    device = watch.report()["device"]
    assert len(device["samples"]) <= 10
    assert monitor.clocks(device) == "not throttled, power-capped in 50 of 100 readings (50.0 %)"
    assert not list(monitor.contradictions(device))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"limited": {"readings": 3, "thermal": 0, "hardware": 0, "power": 0}}, "0 readings of limited clocks (power)"),
        ({"limited": {"readings": 9, "thermal": 0, "hardware": 0, "power": 1}}, "9 readings of limited clocks"),
        ({"throttled": True}, "throttled is True, which the readings contradict"),
        ({"sampled": 4, "limited": {"readings": 4, "thermal": 0, "hardware": 0, "power": 5}}, "5 readings"),
        ({"sampled": 4, "limited": {"readings": 4, "thermal": 0, "hardware": 0, "power": 0}}, "0 readings"),
    ],
)
def test_counts_that_the_readings_do_not_give_are_found(change: dict[str, Any], said: str) -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=60) as watch:
        gpu.now = reading(reasons=4)
        watch.sample()
        gpu.now = reading()
    (text,) = monitor.contradictions(watch.report()["device"] | change)
    assert said in text


@pytest.mark.parametrize("reasons", [0, 4, 32])
def test_receipts_old_and_new_say_what_limited_the_clocks(reasons: int) -> None:
    path = next(path for path in pages.listed() if "-perf-" in path.name)
    document = statement.read(path)
    body = document["predicate"]["receipt"]
    with Monitor(lambda: reading(reasons=reasons), period=60) as watch:
        pass
    for old in (False, True):
        body["monitor"] = watch.report()
        if old:
            del body["monitor"]["device"]["limited"]
        assert not statement.schema_errors(document)
        words = monitor.clocks(body["monitor"]["device"])
        assert f", {words}\n" in show.summary(document)
        assert show.markdown([document]).endswith(f"; GPU {words}")
    assert (
        words
        == {
            0: CALM,
            4: "not throttled, power-capped in 2 of 2 readings (100.0 %)",
            32: "thermally throttled in 2 of 2 readings (100.0 %)",
        }[reasons]
    )


def test_a_table_in_a_page_says_what_limited_the_clocks() -> None:
    shelf = pages.Shelf()
    id12, kept = next((id12, kept) for id12, kept in shelf.kept.items() if "-perf-" in kept.path.name)
    with Monitor(lambda: reading(reasons=4), period=60) as watch:
        pass
    kept.document["predicate"]["receipt"]["monitor"] = watch.report()
    page = pages.filled(f"<!-- receipt {id12} -->\n<!-- /receipt -->\n", shelf)
    when = f", {kept.as_of}" if kept.as_of else ""
    assert f"{kept.path.name}){when}; GPU not throttled, power-capped in 2 of 2 readings (100.0 %).\n" in page


@pytest.mark.parametrize("form", ["console", "md"])
def test_perf_says_what_limited_the_clocks(form: str, capsys: pytest.CaptureFixture[str]) -> None:
    with Monitor(lambda: reading(reasons=4), period=60) as watch:
        pass
    perf._print(form, {"measurements": [], "base": None, "throttled": False}, watch)
    assert "\nGPU not throttled, power-capped in 2 of 2 readings (100.0 %)" in capsys.readouterr().out


@pytest.mark.parametrize(("others", "want"), [((0, 0), 0), ((0, 2), 2), ((0, None), None)])
def test_other_processes(others: tuple[int | None, ...], want: int | None) -> None:
    gpu = Gpu()
    with Monitor(gpu.read, period=60) as watch:
        for count in others:
            gpu.now = reading(others=count)
            watch.sample()
    assert watch.report()["device"]["other_processes"] == want


def test_a_long_run_keeps_the_readings_with_most_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(monitor, "KEPT", 10)
    gpu = Gpu()
    with Monitor(gpu.read, period=60) as watch:
        for i in range(95):
            gpu.now = reading(memory=7777 if i == 50 else i)
            watch.sample()
    device = watch.report()["device"]
    assert device["sampled"] == 97
    assert len(device["samples"]) == 10
    assert max(sample[1] for sample in device["samples"]) == device["peak_memory_bytes"] == 7777


def test_no_device_to_watch_is_null_with_the_reason() -> None:
    with Monitor(None, reason="the run was on the CPU") as watch:
        watch.sample()
    assert watch.report() == {"device": None, "device_reason": "the run was on the CPU", "health": None}
    assert watch.baseline is None


def options(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("-b", dest="backend")
    monitor.add_arguments(parser)
    return parser.parse_args(words)


def test_options_choose_what_is_watched() -> None:
    reasons = [
        monitor.from_args(options(*words)).report()["device_reason"] for words in (("--no-monitor",), ("-b", "CPU"))
    ]
    assert reasons == ["--no-monitor", "the run was limited to CPU, which NVML does not see"]
    with pytest.raises(errors.Usage, match="not an http or https URL"):
        monitor.from_args(options("--health-url", "file:///etc/passwd"))


def test_this_machine_is_watched_or_says_why_not() -> None:
    with monitor.from_args(options("-b", "CUDA0")) as watch:
        time.sleep(0.3)
    report = watch.report()
    if report["device"] is None:
        assert report["device_reason"]
    else:
        assert report["device"]["covers_run"]
        assert report["device"]["peak_memory_bytes"] > 0


# ---- a health URL ----


class Server:
    """An HTTP server on a local port that a test can make slow, unwell, or kill."""

    def __init__(self) -> None:
        self.status, self.delay, self.cut = 200, 0.0, False
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                time.sleep(outer.delay)
                if outer.cut:
                    self.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nhalf")
                    return
                self.send_response(outer.status)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, *_: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/health"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.01})
        self.thread.start()

    def die(self) -> None:
        if self.thread.is_alive():
            self.server.shutdown()
            self.thread.join()
            self.server.server_close()


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()
    yield found
    found.die()


def test_a_healthy_server_is_polled_with_its_latency(server: Server) -> None:
    server.delay = 0.02
    with Monitor(None, reason="no GPU", health_url=server.url) as watch:
        time.sleep(1.2)
    health = watch.report()["health"]
    assert health["url"] == server.url
    assert health["period_ms"] == 1000
    assert [status for _, _, status in health["polls"]] == ["200", "200", "200"]  # before, after a second, after
    assert health["failures"] == 0
    assert 20_000_000 <= health["median_latency_ns"] <= health["max_latency_ns"] < 1_000_000_000


def test_a_server_that_dies_in_the_middle_fails_from_then_on(server: Server) -> None:
    with Monitor(None, health_url=server.url, health_period=0.05) as watch:
        time.sleep(0.2)
        server.die()
        time.sleep(0.2)
    health = watch.report()["health"]
    states = [latency is not None for _, latency, _ in health["polls"]]
    assert states[0] is True
    assert states[-1] is False
    assert states == sorted(states, reverse=True)  # well, then dead
    assert health["failures"] == states.count(False)
    assert health["polls"][-1][1:] == [None, "ConnectionRefusedError"]
    assert health["max_latency_ns"] > 0


def test_a_server_that_answers_with_an_error_fails(server: Server) -> None:
    server.status = 503
    with Monitor(None, health_url=server.url) as watch:
        pass
    assert [poll[1:] for poll in watch.report()["health"]["polls"]] == [[None, "503"], [None, "503"]]


def test_a_server_that_cuts_an_answer_off_fails(server: Server) -> None:
    server.cut = True
    with Monitor(None, health_url=server.url) as watch:
        pass
    assert watch.report()["health"]["polls"][0][1:] == [None, "IncompleteRead"]


def test_a_server_that_hangs_times_out(server: Server) -> None:
    server.delay = 1.5
    with Monitor(None, health_url=server.url, health_period=0.1) as watch:
        pass
    assert watch.report()["health"]["polls"][0][1:] == [None, "TimeoutError"]


def test_credentials_stay_out_of_the_report() -> None:
    with Monitor(None, health_url="http://user:secret@127.0.0.1:9/health?key=secret") as watch:
        pass
    assert watch.report()["health"]["url"] == "http://127.0.0.1:9/health"


def test_a_url_that_is_none_is_a_failed_poll() -> None:
    with monitor.from_args(options("-b", "CPU", "--health-url", "http://[")) as watch:
        pass
    assert watch.report()["health"]["failures"] == 2
