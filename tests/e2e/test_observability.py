"""What an operator sees of a real server with two engines: traces across processes, and JSON log lines."""

from __future__ import annotations

import json
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from collector import SentSpan, running_collector
from pictures import alpha_mask, encode, photo
from prometheus_client.parser import text_string_to_metric_families
from server_process import ServerProcess, fork, start

FILES = {"image": encode(photo()), "mask": alpha_mask()}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
OTHER = "2af7651916cd43dd8448eb211c80319e"
UNSAMPLED = "1af7651916cd43dd8448eb211c80319d"


def post(server: ServerProcess, headers: dict[str, str] | None = None, **fields: str) -> httpx.Response:
    data = {"prompt": "a secret wish"} | fields
    return httpx.post(f"{server.base_url}/images/edits", data=data, files=FILES, headers=headers, timeout=60)


@dataclass
class Seen:
    """Everything observed of a server that has ended."""

    spans: list[SentSpan]
    lines: list[dict[str, Any]]  # of its log
    answers: dict[str, httpx.Response]
    metrics: dict[str, float]  # sample name and labels -> value, before the end

    def of(self, trace_id: str) -> list[SentSpan]:
        return sorted((span for span in self.spans if span.trace_id == trace_id), key=lambda span: span.start)

    def lines_of(self, answer: str) -> list[dict[str, Any]]:
        request_id = self.answers[answer].headers["x-request-id"]
        return [line for line in self.lines if line.get("request_id") == request_id]


@pytest.fixture(scope="module")
def seen(server_flags: tuple[str, ...], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    flags = ("--data-parallel-size", "2", "--router-policy", "round-robin", "--log-format", "json")
    with running_collector() as collector:
        scratch = tmp_path_factory.mktemp("server") / "scratch"
        server = fork(scratch, *server_flags, *flags, "--otlp-traces-endpoint", collector.url)
        answers = use(server)
        metrics = scrape(server)
        assert server.stop() == 0, server.log.read_text()
        lines = [json.loads(line) for line in server.log.read_text().splitlines()]
        yield Seen(collector.spans, lines, answers, metrics)


def use(server: ServerProcess) -> dict[str, httpx.Response]:
    parent = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    other = {"traceparent": f"00-{OTHER}-{PARENT}-01"}
    answers = {
        "edit": post(server, parent, n="2", stream="true", partial_images="1"),
        "unsampled": post(server, {"traceparent": f"00-{UNSAMPLED}-{PARENT}-00"}),
        "refused": post(server, n="99"),
        "no picture": httpx.post(
            f"{server.base_url}/images/edits", data={"prompt": "p"}, files={"image": b"nonsense"}, timeout=60
        ),
    }
    answers["template"] = httpx.post(
        f"{server.base_url}/templates", files={"image": FILES["image"]}, headers=other, timeout=60
    )
    httpx.get(f"{server.base_url}/models")
    assert kill_an_image_processor(server)
    answers["after a death"] = post(server)
    return answers


def kill_an_image_processor(server: ServerProcess) -> bool:
    victim = next(child for child in server.children() if "stencil-images" in child.cmdline())
    victim.send_signal(signal.SIGKILL)
    psutil.wait_procs([victim], timeout=5)
    deadline = time.monotonic() + 5
    while "image_processor_deaths_total 1.0" not in httpx.get(f"{server.url}/metrics").text:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return True


def scrape(server: ServerProcess) -> dict[str, float]:
    """Read the metrics after the engines have reported, which takes up to a second."""
    deadline = time.monotonic() + 5
    while True:
        families = text_string_to_metric_families(httpx.get(f"{server.url}/metrics").text)
        samples = [sample for family in families for sample in family.samples]
        metrics = {",".join([sample.name, *sample.labels.values()]): sample.value for sample in samples}
        if metrics["stencil:step_time_seconds_count"] == metrics["stencil:steps_total"] == 4 * 4:
            return metrics
        assert time.monotonic() < deadline, metrics
        time.sleep(0.1)


# --------------------------------------------------------------------------------------------------------- traces


def test_one_trace_from_the_client_to_both_engines(seen: Seen) -> None:
    spans = seen.of(TRACE)
    root = next(span for span in spans if span.parent_id == PARENT)
    assert (root.name, root.process) == ("POST /v1/images/edits", "api")
    below = [span for span in spans if span.parent_id == root.span_id]
    assert sorted((span.name, span.process) for span in below) == [
        ("compose", "api"),
        ("compose", "api"),
        ("compose", "api"),
        ("compose", "api"),
        ("engine", "engine-0"),
        ("engine", "engine-1"),
        ("prepare", "api"),
        ("queue", "api"),
        ("queue", "api"),
    ]
    for engine in (span for span in below if span.name == "engine"):
        stages = [span for span in spans if span.parent_id == engine.span_id]
        assert {span.process for span in stages} == {engine.process}
        names = [span.name for span in stages]
        assert sorted(names[:2]) == ["image_encode", "text_encode"]
        assert names[2] == "denoise"
        assert sorted(names[3:]) == ["decode", "preview"]
        assert all(engine.start <= span.start <= span.end <= engine.end for span in stages)
    assert all(root.start <= span.start <= span.end <= root.end for span in spans)
    assert not any(span.is_error for span in spans)


def test_a_template_is_traced_as_well(seen: Seen) -> None:
    assert seen.answers["template"].status_code == 200
    root = next(span for span in seen.spans if span.name == "POST /v1/templates")
    below = [span.name for span in seen.of(root.trace_id) if span.parent_id == root.span_id]
    assert below == ["prepare", "prime"]


def test_steps_are_events_of_one_span(seen: Seen) -> None:
    denoise = next(span for span in seen.of(TRACE) if span.name == "denoise")
    assert denoise.events == ("step",) * 4
    assert denoise.attributes["stencil.steps"] == 4
    seconds = (denoise.end - denoise.start) / 1e9
    assert 0 < denoise.attributes["stencil.ms"] / 1e3 <= seconds


def test_the_request_span_has_the_outcome(seen: Seen) -> None:
    root = next(span for span in seen.of(TRACE) if span.parent_id == PARENT)
    assert root.attributes["stencil.request_id"] == seen.answers["edit"].headers["x-request-id"]
    assert root.attributes["http.response.status_code"] == 200
    assert (root.attributes["stencil.images"], root.attributes["stencil.outcome"]) == (2, "finished")
    assert 0 < root.attributes["stencil.mask_ratio"] < 1
    engine = next(span for span in seen.of(TRACE) if span.name == "engine")
    assert engine.attributes["stencil.cache"] == "miss"


def test_a_client_decides_whether_it_is_traced(seen: Seen) -> None:
    assert seen.answers["unsampled"].status_code == 200
    assert seen.of(UNSAMPLED) == []


def test_requests_without_a_trace_begin_one(seen: Seen) -> None:
    request_id = seen.answers["refused"].headers["x-request-id"]
    (refused,) = (span for span in seen.spans if span.attributes.get("stencil.request_id") == request_id)
    assert (refused.parent_id, refused.attributes["stencil.outcome"]) == ("", "refused")
    assert len(seen.of(refused.trace_id)) == 1
    assert len({span.trace_id for span in seen.spans}) == 5  # /v1/models and /metrics leave none


def test_spans_hold_no_prompt(seen: Seen) -> None:
    assert "wish" not in str(seen.spans)


# --------------------------------------------------------------------------------------------------------- logs


def test_one_line_per_request(seen: Seen) -> None:
    for answer, message, status in (
        ("edit", "finished", 200),
        ("unsampled", "finished", 200),
        ("refused", "refused", 400),
        ("no picture", "refused", 400),
    ):
        (line,) = seen.lines_of(answer)
        assert (line["message"], line["status"], line["process"]) == (message, status, "stencil"), answer
    (line,) = seen.lines_of("edit")
    assert (line["images"], line["engines"], line["cache"]) == (2, [0, 1], "miss")
    assert line["ms"].keys() == {"queue", "preprocess", "encode", "prime", "denoise", "decode", "postprocess"}
    assert seen.lines_of("no picture")[0]["error"] == "invalid_image_file"


def test_log_lines_of_a_death_have_no_request_id(seen: Seen) -> None:
    (line,) = [line for line in seen.lines if "image processor died" in line["message"]]
    assert (line["level"], line["logger"]) == ("error", "stencil.images")
    assert not line.get("request_id")


def test_the_log_holds_no_prompt(seen: Seen) -> None:
    assert "wish" not in json.dumps(seen.lines)


# --------------------------------------------------------------------------------------------------------- metrics


def test_metrics_of_two_engines(seen: Seen) -> None:
    metrics = seen.metrics
    model = "tiny/fill"
    assert [metrics[f"stencil:engine_alive,{engine}"] for engine in (0, 1)] == [1, 1]
    assert sum(metrics[f"stencil:router_requests_total,{engine}"] for engine in (0, 1)) == 5
    assert all(metrics[f"stencil:worker_busy_seconds_total,{engine},denoise"] > 0 for engine in (0, 1))
    assert metrics[f"stencil:request_success_total,stop,{model}"] == 4
    assert metrics["stencil:request_rejects_total,invalid"] == 2
    assert metrics["stencil:image_processor_deaths_total"] == 1
    assert metrics["stencil:step_batch_size_sum"] == 16
    assert metrics["stencil:step_tokens_sum"] == metrics["stencil:tokens_computed_total"]
    assert 0 < metrics["stencil:step_bound_seconds_total"] <= metrics["stencil:step_predicted_seconds_total"]


# --------------------------------------------------------------------------------------------------------- without


def test_without_an_endpoint_no_process_imports_opentelemetrys_sdk(
    server_flags: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Python lists every import on stderr, in children too. FastAPI imports OpenTelemetry's API package itself."""
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")
    server = start(tmp_path / "scratch", *server_flags)
    assert post(server, {"traceparent": f"00-{TRACE}-{PARENT}-01"}).status_code == 200
    assert server.stop() == 0
    imported = set(re.findall(r"^import time:.*\| +(\S+)$", server.log.read_text(), re.MULTILINE))
    assert {
        "engine.observability.tracing",
        "engine.engine_core.engine_process",
        "model_executor.worker.loading.resident",
        "torch",
    } <= imported
    heavy = ("opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.proto", "engine.observability.otlp_tracing")
    assert [name for name in imported if name.startswith(heavy)] == []


def test_a_collector_that_does_not_answer_delays_nothing(server_flags: tuple[str, ...], tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # accepts in its backlog, and reads nothing
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/v1/traces"
        server = fork(tmp_path / "scratch", *server_flags, "--otlp-traces-endpoint", url)
        started = time.monotonic()
        assert post(server).status_code == 200
        assert server.stop() == 0
        assert time.monotonic() - started < 15
