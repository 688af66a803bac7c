"""Goodput of policies on a server, small; and what is made of records whose outcome is known."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from statistics import StatisticsError

import forked_server
import msgspec
import pytest
from fakes import MODEL, make_edit
from forked_processes import result_of
from known_costs import AROUND, SECONDS, known

from benchmarks.load.client import Outcome, Refusal, Run
from benchmarks.serving import goodput_bench
from benchmarks.serving import recorded_server as recorded_servers
from benchmarks.serving.cell_outcomes import Outcomes, outcomes_of
from benchmarks.serving.goodput_bench import CELLS
from benchmarks.serving.goodput_cells import compared, main, policy_line
from benchmarks.serving.lone_run import LoneRun, crowding_of
from benchmarks.serving.recorded import CLOCKWORK, Arrival, Batch
from benchmarks.serving.recorded_server import RecordedServer
from benchmarks.simulation.outside import Crowding, Surroundings
from benchmarks.simulation.server_engine import Known, Simulated, serve
from core.config import ModelConfig
from core.messages.codec import encode
from core.messages.engine import EngineRequest
from tools.random_checkpoints import make_flux_fill


def batch(started: float, op: str = "denoise", rank: int = 0, sent: float | None = None, size: int = 1) -> Batch:
    """One of a second."""
    requests = tuple(map(str, range(size)))
    sent = started if sent is None else sent
    return Batch(rank, op, requests, sent, started, 1.0, 1, engine_cpu=started / 100, policy_cpu=started / 1000)


def outcome(latency: float, slo: float, status: int = 0) -> Outcome:
    refusal = Refusal(status, "no") if status else None
    return Outcome(0.0, 0.0, latency, None, "no" if status else "", {}, 1e3 * slo, refusal)


def test_every_request_has_one_end() -> None:
    every = [outcome(1.0, 2.0), outcome(3.0, 2.0), outcome(0.1, 2.0, 503), outcome(0.1, 2.0, 504), outcome(0, 2.0, 500)]
    found = outcomes_of(Run(every, 9.0, 0.1), batch(0.0), [batch(1.0)], 1.0)
    ends = (found.in_time, found.late, found.refused, found.given_up, found.failed)
    assert ends == (1, 1, 1, 1, 1)
    assert found.sent == 5


def test_a_rank_switches_where_it_had_another_op_to_do_and_waited() -> None:
    batches = [
        batch(0.0),
        batch(1.01, "decode", sent=0.5),  # counts: it was there already
        batch(2.51, sent=2.5),  # was sent after the end of the one before: the rank had no work
        batch(3.6, sent=3.0),  # the same op
        batch(0.0, "decode", rank=1),
    ]
    found = outcomes_of(Run([outcome(1.0, 2.0)], 5.0, 0.1), batch(0.0), batches, 1.0)
    assert found.switching == pytest.approx(0.01)
    assert found.worker_seconds == pytest.approx(5.0)
    assert (found.engine_cpu, found.policy_cpu) == (pytest.approx(0.036), pytest.approx(0.0036))


def test_batches_are_told_by_op_and_over_time() -> None:
    batches = [batch(0.0, size=2), batch(1.0, size=4), batch(7.0, size=6), batch(8.0, "decode", size=3)]
    found = outcomes_of(Run([outcome(1.0, 2.0)], 9.0, 0.1), batch(0.0), batches, 1.0)
    assert found.mean_batch == {"denoise": 4.0, "decode": 3.0}
    assert found.batches == [(2.5, 3.0), (7.5, 6.0)]


# ------------------------------------------------------------------------------------------------------ the simulation


ALONE = sum(SECONDS.values()) + 3 * SECONDS["denoise"] + AROUND.prepare + AROUND.deliver
"""Seconds of a request of four steps."""


def request(name: str, arrival: float, seconds: float) -> EngineRequest:
    return msgspec.structs.replace(make_edit(name, steps=4, arrival=arrival), model=MODEL.name, deadline=seconds)


@pytest.mark.parametrize(("seconds", "in_time"), [(1.05 * ALONE, 1), (0.95 * ALONE, 0)])
def test_a_lone_request_takes_what_was_measured(seconds: float, in_time: int) -> None:
    requests = [request("a", 2.0, 2.0 + seconds)]
    served = serve(known(), AROUND, CLOCKWORK, requests, [], num_ranks=2, num_cores=inf)
    assert served.in_time == in_time


@pytest.mark.parametrize(("num_cores", "seconds"), [(1.0, 4.0), (2.0, 2.0), (8.0, 2.0)])
def test_requests_that_come_at_once_are_prepared_on_the_cores_there_are(num_cores: float, seconds: float) -> None:
    requests = [msgspec.structs.replace(request(name, 0.0, 0.0), deadline=None) for name in "ab"]
    around = Surroundings(prepare=2.0, deliver=0.0, trip=0.0, pause=0.0, outside_cpu=2.0)
    served = serve(known(), around, "default", requests, [], num_ranks=2, num_cores=num_cores)
    work = ALONE - AROUND.prepare - AROUND.deliver
    first = min(served.latencies.values())
    assert first == pytest.approx(seconds + work * (2 if num_cores < 2 else 1), rel=0.1)


def test_other_processes_delay_ranks_that_leave_no_core_free() -> None:
    requests = [request("a", 2.0, 100.0)]
    around = replace(AROUND, outside_cpu=1.0)
    spare, scarce = (
        serve(known(), around, "default", requests, [request("w", 0.0, 0.0)], num_ranks=2, num_cores=number)
        for number in (2.0, 1.0)
    )
    beside = around.outside_cpu - around.prepare - around.deliver
    assert scarce.busy_seconds - spare.busy_seconds == pytest.approx(beside, rel=0.01)
    assert spare.busy_seconds == pytest.approx(ALONE - AROUND.prepare - AROUND.deliver, rel=0.05)
    assert [op for _, op, _ in spare.batches].count("denoise") == 4, "warm-ups do not count"


def test_a_request_delays_ranks_by_what_it_costs_other_processes_itself() -> None:
    requests = [request("a", 2.0, 100.0), request("b", 50.0, 100.0)]
    own = {"b": replace(AROUND, outside_cpu=AROUND.prepare + AROUND.deliver + 1.0)}
    around = replace(AROUND, outside_cpu=0.0)
    served = serve(known(), around, "default", requests, [], num_ranks=1, num_cores=1, own=own)
    assert served.latencies["b"] - served.latencies["a"] == pytest.approx(1.0)


def test_ranks_that_have_work_at_once_are_as_much_slower_as_was_measured() -> None:
    requests = [request(name, 2.0, 200.0) for name in "ab"]
    alone, crowded = (
        serve(known(), replace(AROUND, crowding=Crowding(by, 0.0)), CLOCKWORK, requests, [], num_ranks=2, num_cores=inf)
        for by in (1.0, 1.5)
    )
    assert crowded.busy_seconds == pytest.approx(1.5 * alone.busy_seconds, rel=0.1)
    around = replace(AROUND, crowding=Crowding(1.5, 0.0))
    lone = serve(known(), around, CLOCKWORK, requests[:1], [], num_ranks=2, num_cores=inf)
    assert 2 * lone.busy_seconds == pytest.approx(alone.busy_seconds)


def test_a_rank_pauses_between_its_batches() -> None:
    served = [
        serve(known(), replace(AROUND, pause=pause), CLOCKWORK, [request("a", 2.0, 99.0)], [], num_ranks=1, num_cores=9)
        for pause in (0.0, 0.25)
    ]
    num_batches = len(served[0].batches)
    longer = served[1].latencies["a"] - served[0].latencies["a"]
    assert longer == pytest.approx(0.25 * (num_batches - 1))


def test_a_new_request_takes_longer_to_prepare_while_all_ranks_have_work() -> None:
    """As much longer as was measured. With one core that is because the rank has half of it, and is slower itself."""
    requests = [request("a", 2.0, 200.0), request("b", 2.75, 200.0)]
    around = replace(AROUND, deliver=0.0, crowding=Crowding(1.0, 6.0))
    spare, scarce = (
        serve(known(), around, CLOCKWORK, requests, [], num_ranks=1, num_cores=number) for number in (9.0, 1.0)
    )
    prepared = AROUND.prepare + 6.0
    assert spare.latencies["b"] == pytest.approx(prepared + ALONE - AROUND.prepare - AROUND.deliver)
    step = SECONDS["denoise"]
    assert scarce.latencies["a"] - spare.latencies["a"] == pytest.approx(prepared / 2, abs=step)


def test_requests_without_time_left_are_aborted() -> None:
    """Steps take longer than a policy knows that does not end them itself."""
    around = replace(AROUND, crowding=Crowding(3.0, 0.0))
    short, long = (
        serve(known(), around, CLOCKWORK, [request(name, 0.0, of) for name in "ab"], [], num_ranks=2, num_cores=inf)
        for of in (1.05 * ALONE, 9 * ALONE)
    )
    assert (long.in_time, len(long.latencies)) == (2, 2)
    assert (short.in_time, short.latencies) == (0, {})
    assert 0 < short.busy_seconds < 0.7 * long.busy_seconds


@pytest.mark.parametrize(("hand_over", "is_begun"), [(0.0, False), (AROUND.deliver, True)])
def test_servers_reckon_with_what_they_know_of_deliveries(hand_over: float, is_begun: bool) -> None:
    requests = [request("a", 0.0, ALONE - AROUND.deliver / 2)]
    around = replace(AROUND, hand_over=hand_over)
    served = serve(known(), around, CLOCKWORK, requests, [], num_ranks=1, num_cores=inf)
    assert served.in_time == 0
    assert (served.busy_seconds > 0) == is_begun


def test_what_passes_before_a_request_has_arrived_is_not_known_to_the_server() -> None:
    requests = [request("a", 0.0, ALONE - 0.1)]
    known_of, unknown = (
        serve(known(), replace(AROUND, arrive=arrive), CLOCKWORK, requests, [], num_ranks=1, num_cores=inf)
        for arrive in (0.0, 0.2)
    )
    assert not known_of.busy_seconds, "it is hopeless"
    assert unknown.busy_seconds > 0
    assert unknown.in_time == 0


def test_a_request_that_is_sent_late_is_done_as_much_later() -> None:
    soon, late = (
        serve(known(), replace(AROUND, send=send), CLOCKWORK, [request("a", 1.0, 99.0)], [], num_ranks=1, num_cores=inf)
        for send in (0.0, 0.5)
    )
    assert late.latencies["a"] == pytest.approx(soon.latencies["a"] + 0.5)


def test_lone_requests_tell_what_the_server_does_not_know() -> None:
    """Sent at 5, there for the server at 5.5, in the engine at 6, made at 8, with its sender at 9, of which the server
    reckons with 0.75.
    """
    head = msgspec.structs.replace(make_edit("0"), arrival=6.0, deadline=5.5 + 100.0 - 0.75)
    arrival = Arrival(base64.b64encode(encode(head)).decode(), 6.0, 1)
    of = Outcome(0.0, 0.0, 4.0, None, "", {"ms": {"preprocess": 500.0}}, 100e3)
    found = LoneRun(Run([of], 9.0, 0.1, 5.0), [arrival], [batch(7.0)], 0.0).surroundings
    assert (found.prepare, found.arrive, found.deliver, found.hand_over) == pytest.approx((1.0, 0.5, 1.0, 0.25))


def _lone_run(sent: Mapping[str, float], prepared: Mapping[str, float], batches: Sequence[Batch]) -> LoneRun:
    """sent, prepared: by request, seconds."""
    outcomes = [Outcome(0.0, when, 99.0, None, "", {}) for when in sent.values()]
    heads = {name: base64.b64encode(encode(make_edit(name))).decode() for name in sent}
    arrivals = [Arrival(heads[name], when + prepared[name], 1) for name, when in sent.items()]
    return LoneRun(Run(outcomes, 9.0, 0.1), arrivals, list(batches), 0.0)


def _steps(name: str, rank: int, *started: float) -> list[Batch]:
    """Of one request, a second each."""
    return [msgspec.structs.replace(batch(when, rank=rank), requests=(name,)) for when in started]


def test_crowding_is_told_by_what_happens_while_all_ranks_have_work() -> None:
    """A request takes half a second to be prepared, and a second for a step; while both ranks have one, a quarter of a
    second more, and 1.5 seconds.
    """
    alone = _lone_run({"a": 0.5}, {"a": 0.5}, _steps("a", 0, 1.0, 2.0, 3.0))
    steps = [*_steps("a", 0, 1.0, 2.0, 3.0, 4.5, 6.0), *_steps("b", 1, 3.0, 4.5, 6.0), *_steps("c", 0, 7.0, 8.0, 9.0)]
    sent, prepared = {"a": 0.5, "b": 2.0, "c": 4.0}, {"a": 0.5, "b": 1.0, "c": 0.75}
    together = _lone_run(sent, prepared, sorted(steps, key=lambda each: each.started))
    assert crowding_of(alone, together, 2) == Crowding(pytest.approx(1.5), pytest.approx(0.25))
    assert crowding_of(together, alone, 0) == Crowding(1.0, 0.0)
    with pytest.raises(StatisticsError):
        crowding_of(alone, together, 3)


def test_rounds_are_compared_one_by_one() -> None:
    def rounds(*in_time: int) -> list[Outcomes]:
        every = [outcomes_of(Run([outcome(1.0, 2.0)], 9.0, 0.1), batch(0.0), [batch(1.0)], 1.0)]
        return [msgspec.structs.replace(every[0], in_time=number) for number in in_time]

    simulated = [Simulated(8, {}, [], 1.0, {}, Counter(), 0.01)] * 3
    measured = {"default": rounds(12, 14, 10), "clockwork": rounds(10, 12, 8)}
    (line,) = compared(measured, dict.fromkeys(measured, simulated))
    assert "default against clockwork: 1.200 +- 0.000 (predicted 1.000)" in line
    measured["clockwork"] = rounds(10, 16)  # a round is left to be run
    (line,) = compared(measured, dict.fromkeys(measured, simulated))
    assert "default against clockwork: 1.000 +- 0.154" in line


def test_a_policy_that_refuses_every_request_has_its_line() -> None:
    refused = outcomes_of(Run([outcome(0.1, 2.0, 503)], 9.0, 0.1), batch(0.0), [], 1.0)
    simulated = [Simulated(0, {}, [], 0.0, {}, Counter(), 0.0)]
    assert policy_line([refused], simulated).split()[-4:] == ["nan%"] * 4, "shares of no time"
    served = outcomes_of(Run([outcome(1.0, 2.0)], 9.0, 0.1), batch(0.0), [batch(1.0)], 1.0)
    measured = {"default": [served], "clockwork": [refused]}
    (line,) = compared(measured, dict.fromkeys(measured, simulated))
    assert "batches nanx" in line


# ------------------------------------------------------------------------------------------------------ a server


@pytest.fixture
def _kept(launcher: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Servers are forked and stay, each for all runs of its kind, and costs are measured once, in a forked process:
    starts take nearly all of the time. They need not settle, since no figure is checked that a busy core changes.
    """
    monkeypatch.setattr(recorded_servers, "start_server", forked_server.start_server)
    servers, known = dict[tuple[str, ...], RecordedServer](), list[Known]()
    start = goodput_bench.recorded_server

    def of_new_process(config: ModelConfig) -> Known:
        if not known:
            known.append(result_of(launcher, Known.of, config))
        return known[0]

    with ExitStack() as stack:

        @contextmanager
        def recorded_server(flags: Sequence[str], policy: str) -> Iterator[RecordedServer]:
            kind = (policy, *flags)
            if kind not in servers:
                servers[kind] = stack.enter_context(start(flags, policy))
            yield servers[kind]

        monkeypatch.setattr(goodput_bench, "recorded_server", recorded_server)
        monkeypatch.setattr(goodput_bench, "SETTLE_SECONDS", 0.0)
        monkeypatch.setattr(Known, "of_new_process", of_new_process)
        yield


@pytest.mark.usefixtures("_kept")
def test_cells_are_measured_one_by_one_and_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, results = make_flux_fill(tmp_path / "flux"), tmp_path / "results.json"
    flags = ["--model", str(model), "--results", str(results), "--num-prompts", "6", "--sizes", "64x64"]
    flags += ["--num-inference-steps", "uniform:2-4", "--num-templates", "2", "--cells", "3"]
    main([*flags, "--policies", "clockwork"])
    main([*flags, "--policies", "clockwork", "default"])
    main([*flags, "--policies", "clockwork", "--rounds", "2"])
    kept = json.loads(results.read_text())
    assert list(kept["measured"]) == [CELLS[2].name]
    rounds = kept["measured"][CELLS[2].name]
    assert {policy: len(of) for policy, of in rounds.items()} == {"clockwork": 2, "default": 1}
    for of in [*rounds["clockwork"], *rounds["default"]]:
        assert of["sent"] == 6 == sum(of[end] for end in ("in_time", "late", "refused", "given_up", "failed"))
        assert of["failed"] == 0
        was_served = of["in_time"] + of["late"] > 0  # a busy machine may refuse all
        assert (of["busy"].get("denoise", 0.0) > 0) >= was_served
        assert (0 < of["policy_cpu"] < of["engine_cpu"]) >= was_served
        assert len(of["probes"]) == 2
    assert rounds["default"][0]["pace"] == rounds["clockwork"][0]["pace"] != rounds["clockwork"][1]["pace"]
    assert len(kept["crowding"]) == 2
    assert min(crowding["steps"] for crowding in kept["crowding"]) >= 1
    around = kept["alone"]["probe"]["surroundings"]
    assert min(around[name] for name in ("prepare", "deliver", "outside_cpu")) > 0
    assert len(kept["alone"]["requests"]) == 6
    capsys.readouterr()
    monkeypatch.setattr(goodput_bench, "recorded_server", None)  # all is kept
    main([*flags, "--policies", "clockwork", "default"])
    table = capsys.readouterr().out
    assert "there is no profile" in table
    assert "default against clockwork" in table
    with pytest.raises(SystemExit, match="other settings"):
        main([*flags, "--seed", "1"])
    results.write_text('{"settings": {}, "measured": {"cell": {"default": {}}}}')
    with pytest.raises(SystemExit, match="remove it"):
        main(flags)
