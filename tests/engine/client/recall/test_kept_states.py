"""KeptStates: what is found, what is evicted, and that its bytes are bounded."""

from __future__ import annotations

import random

import numpy as np
import pytest

from core.sampling_params import SamplingParams
from engine.client.recall.kept_states import MOST_PROMPTS, Embedding, KeptRun, KeptStates
from engine.client.recall.run_key import RunKey
from engine.client.sessions.client_arena import ClientArena

WIDTH = 4
SHAPE = 2, 8
RUN_BYTES = 4096 + 2 * (4 * WIDTH + 8)
"""Of two states, as whole pages of memory, and an embedding."""


@pytest.fixture
def arena() -> ClientArena:
    return ClientArena(2**20)


def key(owner: str = "me", model: str = "m", content_id: str = "") -> RunKey:
    return RunKey(owner, model, (), "inpaint", 64, 64, content_id, SamplingParams())


def direction(*numbers: float) -> Embedding:
    vector = np.array(numbers + (0.0,) * (WIDTH - len(numbers)), np.float32)
    return vector / np.float32(np.linalg.norm(vector))


def keep(
    states: KeptStates, name: str, embedding: Embedding | None = None, *, of: RunKey | None = None, seed: int = 1
) -> KeptRun | None:
    """Its prompt is its name."""
    run = states.reserve(KeptRun(of or key(), seed, name, 0), (2, 4), SHAPE, WIDTH)
    if run is not None:
        states.add(run, direction(1) if embedding is None else embedding, name)
    return run


def names(states: KeptStates) -> list[str]:
    return sorted(run.request_id for run in states._runs)


def nearest(
    states: KeptStates, embedding: Embedding, of: RunKey | None = None, seed: int | None = None, prompt: str = "p"
) -> str:
    found = states.nearest(of or key(), embedding, prompt, seed)
    return "" if found is None else f"{found[0].request_id} {found[1]:g}"


def test_the_most_similar_prompt_of_an_equal_run_is_found(arena: ClientArena) -> None:
    states = KeptStates(10 * RUN_BYTES, arena)
    keep(states, "right", direction(1, 0))
    keep(states, "up", direction(0, 1), seed=2)
    assert nearest(states, direction(0.8, 0.6)) == "right 0.8"
    assert nearest(states, direction(0.6, 0.8)) == "up 0.8"
    assert nearest(states, direction(0.6, 0.8), seed=1) == "right 0.6", "begun with this noise"
    assert nearest(states, direction(1, 0), seed=3) == ""
    for other in (key(owner="you"), key(model="n"), key(content_id="c")):
        assert nearest(states, direction(1, 0), other) == ""


def test_without_a_seed_no_prompt_has_a_picture_that_it_has_had(arena: ClientArena) -> None:
    states = KeptStates(10 * RUN_BYTES, arena)
    run, _ = keep(states, "right", direction(1, 0)), keep(states, "up", direction(0, 1))
    assert run is not None
    assert nearest(states, direction(1, 0), prompt="right") == "up 0", "its own would be the same again"
    assert nearest(states, direction(1, 0), prompt="right", seed=1) == "right 1", "asked for by its seed"
    states.lend(run, "p")
    states.give_back(run)
    assert nearest(states, direction(1, 0)) == "up 0"
    assert nearest(states, direction(1, 0), prompt="q") == "right 1"
    for number in range(100):
        states.lend(run, str(number))
        states.give_back(run)
    assert len(run.prompts) == MOST_PROMPTS, "bounded"
    assert nearest(states, direction(1, 0), prompt="q") == "up 0", "it is not known whether there is one already"


def test_whose_pages_are_dropped_loses_its_states(arena: ClientArena) -> None:
    states = KeptStates(10 * RUN_BYTES, arena)
    for owner in ("me", "you"):
        keep(states, owner, of=key(owner, content_id="c"))
    keep(states, "other", of=key(content_id="d"))
    states.drop("m", "c", "me")
    assert names(states) == ["other", "you"]
    states.drop("m", "c", "")  # pages of all
    assert names(states) == ["other"]


def test_a_run_has_memory_for_its_states_alone(arena: ClientArena) -> None:
    states = KeptStates(10 * RUN_BYTES, arena)
    for number in range(2):
        run = keep(states, str(number))
        assert run is not None
        assert {steps: state.shape for steps, state in run.states.items()} == {2: SHAPE, 4: SHAPE}
        for state in run.states.values():
            arena.view(state)[:] = number
    assert [float(arena.view(state).mean()) for run in states._runs for state in run.states.values()] == [0, 0, 1, 1]


def test_the_least_useful_is_evicted_and_old_use_fades(arena: ClientArena) -> None:
    states = KeptStates(3 * RUN_BYTES, arena)
    used, *_ = [keep(states, name) for name in ("used", "b", "c")]
    assert used is not None
    for _ in range(3):
        states.lend(used, "p")
        states.give_back(used)
    keep(states, "d")
    assert names(states) == ["c", "d", "used"], "of equal use the oldest"
    for name in "efghij":
        keep(states, name)
        assert states.used_bytes == 3 * RUN_BYTES
    assert names(states) == ["h", "i", "j"], "it was not used any more"
    states.check_integrity()


def test_what_is_lent_stays_until_it_is_given_back(arena: ClientArena) -> None:
    states = KeptStates(2 * RUN_BYTES, arena)
    run, other = keep(states, "a", of=key(content_id="c")), keep(states, "b")
    assert run is not None
    assert other is not None
    states.lend(run, "p")
    states.lend(other, "p")
    assert keep(states, "c") is None, "nothing may be evicted"
    states.drop("m", "c", "me")
    assert names(states) == ["b"]
    assert states.used_bytes == 2 * RUN_BYTES, "it is found no more, and still read"
    states.give_back(run)
    assert states.used_bytes == RUN_BYTES
    assert keep(states, "c") is not None
    states.give_back(other)
    states.check_integrity()


def test_a_run_that_is_cancelled_leaves_nothing(arena: ClientArena) -> None:
    states = KeptStates(RUN_BYTES, arena)
    run = states.reserve(KeptRun(key(), 1, "r", 0), (2, 4), SHAPE, WIDTH)
    assert run is not None
    assert states.reserve(KeptRun(key(), 1, "s", 0), (2, 4), SHAPE, WIDTH) is None, "its room is taken"
    states.cancel(run)
    assert (states.used_bytes, arena.used_bytes) == (0, 0)


def test_a_full_arena_keeps_nothing() -> None:
    arena = ClientArena(4096)
    arena.alloc(4096)
    states = KeptStates(10 * RUN_BYTES, arena)
    assert keep(states, "a") is None
    assert states.used_bytes == 0


def test_whatever_happens_the_records_agree(arena: ClientArena) -> None:
    dice, states, lent = random.Random(4), KeptStates(20 * RUN_BYTES, arena), list[KeptRun]()
    keys = [key(owner) for owner in "abc"]
    for number in range(2000):
        which, vector = dice.choice(keys), direction(*(dice.gauss(0, 1) for _ in range(WIDTH)))
        match dice.randrange(4):
            case 0 | 1:
                keep(states, str(number), vector, of=which)
            case 2 if (found := states.nearest(which, vector, prompt := dice.choice("pqr"), None)) is not None:
                best = max(float(run_vector @ vector) for run_vector in vectors(states, which, prompt))
                assert found[1] == pytest.approx(best, abs=1e-3)
                assert found[0].key == which
                states.lend(found[0], prompt)
                lent.append(found[0])
            case 3 if lent:
                states.give_back(lent.pop(dice.randrange(len(lent))))
        states.check_integrity()
    for run in lent:
        states.give_back(run)
    assert states.used_bytes == len(states) * RUN_BYTES


def vectors(states: KeptStates, which: RunKey, prompt: str) -> list[Embedding]:
    """Of runs that have made no picture of the prompt."""
    group = states._groups[which]
    return [group._embeddings[number] for number, run in enumerate(group.runs) if hash(prompt) not in run.prompts]
