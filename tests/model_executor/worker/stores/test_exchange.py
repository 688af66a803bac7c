"""Values that ranks send each other while batches run: real sockets, two stores."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator

import msgspec
import pytest
import torch

from core.handles import TensorKey, TensorRef
from core.ipc.peer_sockets import Inboxes, PeerSockets
from core.ipc.shared_array import Arena
from core.messages.peers import RankGone
from core.messages.worker import Batch, Delivery, Item, StepPlan
from core.scheduling.ops.text_encode import TextEncode
from model_executor.worker.stores.exchange import Exchange
from model_executor.worker.stores.tensor_store import MissingValueError, TensorStore

HINT = TensorKey("r", "hint", "x", 1)
STATE = TensorKey("r", "hint", "state", 1)


class Rank:
    """One rank's store and its end of the exchange."""

    def __init__(self, rank: int, sockets: PeerSockets, arena: Arena) -> None:
        self.store = TensorStore(rank, torch.device("cpu"), arena)
        self.sockets = sockets
        self.exchange = Exchange(self.store, sockets)


@pytest.fixture
def inboxes() -> Iterator[Inboxes]:
    inboxes = Inboxes(2)
    yield inboxes
    inboxes.close()


@pytest.fixture
def ranks(inboxes: Inboxes) -> Iterator[list[Rank]]:
    arena = Arena.create(2, 1 << 16)
    made = [Rank(rank, sockets_of(inboxes, rank), arena) for rank in range(2)]
    yield made
    for each in made:
        each.sockets.close()
    arena.close()


def sockets_of(inboxes: Inboxes, rank: int) -> PeerSockets:
    inbox, *outboxes = inboxes.ends_of(rank)
    return PeerSockets(inbox, outboxes)


def batch(node: str, *deferred: TensorKey, version: int = 1) -> Batch:
    refs = tuple(TensorRef(key, 0, is_deferred=True) for key in deferred)
    work = TextEncode(prompt="", max_sequence_length=1)  # the exchange does not look at it
    return Batch(0, "x", (0,), (Item("r", node, "m", work, refs, version=version),))


def test_what_a_rank_has_already_is_sent_at_once(ranks: list[Rank]) -> None:
    source, target = ranks
    source.store.put(HINT, torch.arange(6).reshape(2, 3))
    source.store.put_series(STATE, (torch.ones(2), torch.zeros(0)))
    source.exchange.begin_plan(0, [Delivery(HINT, 0, 1), Delivery(STATE, 0, 1)], [])
    target.exchange.begin_batch(batch("step", HINT, STATE))
    target.exchange.wait(HINT)
    target.exchange.wait(STATE)
    target.exchange.finish_batch()
    assert torch.equal(target.store.get(HINT), torch.arange(6).reshape(2, 3))
    assert [len(tensor) for tensor in target.store.get_series(STATE)] == [2, 0]


def test_a_sampler_goes_on_from_the_state_that_was_sent(ranks: list[Rank]) -> None:
    source, target = ranks
    generator = torch.Generator().manual_seed(7)
    source.store.put_series(STATE, (torch.ones(2), generator.get_state()))
    source.exchange.begin_plan(0, [Delivery(STATE, 0, 1)], [])
    target.exchange.begin_batch(batch("step", STATE))
    target.exchange.wait(STATE)
    _, state = target.store.get_series(STATE)
    drawn = torch.rand(3, generator=torch.Generator().set_state(state))
    assert torch.equal(drawn, torch.rand(3, generator=generator))
    target.exchange.finish_batch()


def test_a_reader_waits_within_its_batch_until_the_source_has_made_the_value(ranks: list[Rank]) -> None:
    source, target = ranks
    target.exchange.begin_batch(batch("step", HINT))
    came = threading.Event()

    def read() -> None:
        target.exchange.wait(HINT)
        came.set()

    reader = threading.Thread(target=read)
    reader.start()
    making = batch("hint")
    source.exchange.begin_plan(0, [Delivery(HINT, 0, 1)], [making])
    assert not came.wait(0.05)
    source.store.put(HINT, torch.ones(3))
    source.exchange.end_batch(making)
    reader.join(10)
    assert came.is_set()
    assert torch.equal(target.store.get(HINT), torch.ones(3))


@pytest.mark.parametrize("is_in_plan", [False, True])
def test_a_value_that_was_not_made_fails_its_reader(ranks: list[Rank], is_in_plan: bool) -> None:
    source, target = ranks
    making = batch("hint")
    source.exchange.begin_plan(0, [Delivery(HINT, 0, 1)], [making] if is_in_plan else [])
    source.exchange.end_batch(making)
    target.exchange.begin_batch(batch("step", HINT))
    with pytest.raises(MissingValueError, match="was not made"):
        target.exchange.wait(HINT)
    target.exchange.finish_batch()
    target.exchange.begin_batch(batch("other"))
    target.exchange.wait(HINT)  # no batch waits for it any more


def test_a_batch_takes_what_it_did_not_wait_for(ranks: list[Rank]) -> None:
    """Otherwise the value would arrive after it was freed, and stay."""
    source, target = ranks
    target.exchange.begin_batch(batch("step", HINT))
    source.store.put(HINT, torch.ones(3))
    source.exchange.begin_plan(0, [Delivery(HINT, 0, 1)], [])
    target.exchange.finish_batch()
    assert target.store.find(HINT) is not None
    target.store.free(TensorKey("r", "", ""))
    assert len(target.store) == 0


def test_a_value_for_a_later_batch_is_kept(ranks: list[Rank]) -> None:
    source, target = ranks
    for key in (STATE, HINT):
        source.store.put(key, torch.ones(1))
        source.exchange.begin_plan(0, [Delivery(key, 0, 1)], [])
    target.exchange.begin_batch(batch("first", HINT))
    target.exchange.finish_batch()
    assert target.store.find(STATE) is None
    target.exchange.begin_batch(batch("second", STATE))
    target.exchange.finish_batch()
    assert target.store.find(STATE) is not None


def test_a_value_of_an_earlier_run_does_not_wait_for_the_next_one(ranks: list[Rank]) -> None:
    """Its reader was dispatched before, so the ranks would wait in a circle."""
    source, target = ranks
    source.store.put(HINT, torch.ones(1))
    source.exchange.begin_plan(0, [Delivery(HINT, 0, 1)], [batch("hint", version=2)])
    target.exchange.begin_batch(batch("step", HINT))
    target.exchange.wait(HINT)
    assert torch.equal(target.store.get(HINT), torch.ones(1))


def test_a_value_of_the_rank_itself_is_not_sent(ranks: list[Rank]) -> None:
    """A batch on several ranks names the same input on all of them."""
    source, _ = ranks
    source.store.put(HINT, torch.ones(1))
    source.exchange.begin_batch(batch("step", HINT))
    source.exchange.wait(HINT)
    source.exchange.finish_batch()


def test_what_came_for_a_batch_that_does_not_run_is_dropped_with_the_next_plan(ranks: list[Rank]) -> None:
    source, target = ranks
    for seq in (1, 2):
        source.store.put(HINT, torch.full((1,), seq))
        source.exchange.begin_plan(seq, [Delivery(HINT, 0, 1)], [])
    target.exchange.begin_plan(1, [], [])
    assert [parcel.seq for parcel, _ in target.exchange._early] == [1, 2]
    target.exchange.begin_plan(2, [], [])
    assert [parcel.seq for parcel, _ in target.exchange._early] == [2]
    target.exchange.begin_batch(batch("step", HINT))
    target.exchange.wait(HINT)
    assert target.store.get(HINT) == 2


def test_ranks_that_send_each_other_more_than_an_inbox_holds_do_not_block(ranks: list[Rank]) -> None:
    number = 1000

    def send(one: Rank, to: int) -> None:
        one.store.put(HINT, torch.ones(1))
        one.exchange.begin_plan(0, [Delivery(HINT, 1 - to, to)] * number, [])
        while len(one.exchange._early) < number:  # as a batch that waits for them
            one.exchange._receive_all()

    threads = [threading.Thread(target=send, args=(one, 1 - rank), daemon=True) for rank, one in enumerate(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not any(thread.is_alive() for thread in threads)


# --------------------------------------------------------------------------------------- series as they are made


class Streaming:
    """A rank that makes STATE, tensor by tensor, for a batch of the other rank, whose plan comes meanwhile."""

    def __init__(self, ranks: list[Rank]) -> None:
        source, self.target = ranks
        self.plans: list[StepPlan] = []
        self.making, self.made = batch("hint"), list[torch.Tensor]()
        self.store, self.exchange = source.store, Exchange(source.store, source.sockets, self._come)
        self.exchange.begin_plan(0, [], [self.making])
        self.target.exchange.begin_plan(1, [], [batch("step", STATE)])
        self.target.exchange.begin_batch(batch("step", STATE))

    def _come(self) -> list[StepPlan]:
        plans, self.plans = self.plans, []
        return plans

    def ask(self) -> None:
        """The plan comes in which the other rank's batch is."""
        self.delivery = Delivery(STATE, 0, 1)
        self.plans.append(StepPlan(seq=1, deliveries=(self.delivery,)))

    def make(self, *values: float) -> None:
        self.made += [torch.full((2,), value) for value in values]
        self.exchange.publish(STATE, self.made)

    def end(self, *, fails: bool = False) -> None:
        if not fails:
            self.store.put_series(STATE, self.made)
        self.exchange.end_batch(self.making)
        self.exchange.begin_plan(1, [self.delivery], [])

    def part(self, number: int) -> float:
        return float(self.target.exchange.part(STATE, number)[0])


def test_a_series_is_read_while_it_is_made(ranks: list[Rank]) -> None:
    """What was made before the reader's plan came, too."""
    one = Streaming(ranks)
    one.make(1)
    assert not one.target.sockets.has_message()
    one.ask()
    one.make(2)
    assert [one.part(0), one.part(1)] == [1, 2]
    one.make(3, 4)
    assert one.part(3) == 4
    one.end()
    one.target.exchange.finish_batch()
    assert [float(each[0]) for each in one.target.store.get_series(STATE)] == [1, 2, 3, 4]


@pytest.mark.parametrize("num_before", [0, 4])
def test_the_rest_of_a_series_comes_when_it_is_whole(ranks: list[Rank], num_before: int) -> None:
    """Also if nothing is left, or nothing came before."""
    one = Streaming(ranks)
    if num_before:
        one.ask()
    one.make(1, 2, 3, 4)
    if not num_before:
        one.ask()
    one.end()
    assert one.part(3) == 4
    one.target.exchange.finish_batch()
    assert len(one.target.store.get_series(STATE)) == 4


def test_a_series_that_is_tried_again_is_sent_once(ranks: list[Rank]) -> None:
    one = Streaming(ranks)
    one.ask()
    one.make(1, 2)
    one.made.clear()
    for value in (1, 2, 3):
        one.make(value)
    one.end()
    one.target.exchange.finish_batch()
    assert [float(each[0]) for each in one.target.store.get_series(STATE)] == [1, 2, 3]


def test_two_nodes_of_a_batch_may_read_the_same_series(ranks: list[Rank]) -> None:
    one = Streaming(ranks)
    one.target.exchange.begin_batch(batch("other", STATE))
    one.plans.append(StepPlan(seq=1, deliveries=(Delivery(STATE, 0, 1),) * 2))
    one.make(1, 2)
    one.store.put_series(STATE, one.made)
    one.exchange.begin_plan(1, [Delivery(STATE, 0, 1)] * 2, [])
    one.target.exchange.finish_batch()
    assert [float(each[0]) for each in one.target.store.get_series(STATE)] == [1, 2]


def test_a_full_inbox_does_not_stop_what_makes_a_series(ranks: list[Rank]) -> None:
    one = Streaming(ranks)
    one.ask()
    number = 5000
    for value in range(number):
        one.made.append(torch.full((1,), value))
        one.exchange.publish(STATE, one.made)
    ending = threading.Thread(target=one.end, daemon=True)
    ending.start()  # this waits for room
    assert one.part(number - 1) == number - 1
    ending.join(10)
    assert not ending.is_alive()


def test_a_series_that_is_not_made_to_its_end_fails_its_reader(ranks: list[Rank]) -> None:
    one = Streaming(ranks)
    one.ask()
    one.make(1)
    one.end(fails=True)
    assert one.part(0) == 1
    with pytest.raises(MissingValueError, match="was not made"):
        one.part(1)
    one.target.exchange.finish_batch()
    assert one.target.store.find(STATE) is None


async def test_a_wait_for_a_part_ends_when_its_rank_dies(ranks: list[Rank], inboxes: Inboxes) -> None:
    one = Streaming(ranks)
    one.ask()
    one.make(1)
    inboxes.tell(1, gone(0, seq=2))
    with pytest.raises(MissingValueError, match="was not made"):
        one.part(1)
    one.target.exchange.finish_batch()


# ------------------------------------------------------------------------------------------------ ranks that die


def gone(rank: int, seq: int) -> bytes:
    return msgspec.msgpack.encode(RankGone(rank, seq))


async def test_a_wait_for_a_rank_that_has_died_ends_at_once(ranks: list[Rank], inboxes: Inboxes) -> None:
    """What it had sent before its death counts, whether the batch begins before or after the news."""
    source, target = ranks
    source.store.put(STATE, torch.ones(1))
    source.exchange.begin_plan(3, [Delivery(STATE, 0, 1)], [])
    inboxes.tell(1, gone(0, seq=4))
    for _ in range(2):
        target.exchange.begin_plan(3, [], [])
        target.exchange.begin_batch(batch("step", HINT, STATE))
        with pytest.raises(MissingValueError, match="was not made"):
            target.exchange.wait(HINT)
        target.exchange.finish_batch()
    assert target.store.find(STATE) is not None


async def test_the_rank_that_was_restarted_is_waited_for(ranks: list[Rank], inboxes: Inboxes) -> None:
    """It has the inbox of the dead one, and drops what was sent to that one; it is sent nothing of old plans."""
    source, target = ranks
    target.store.put(STATE, torch.zeros(1))
    target.exchange.begin_plan(3, [Delivery(STATE, 1, 0)], [])
    inboxes.tell(1, gone(0, seq=4))
    target.exchange._receive_all()
    target.exchange._send(Delivery(STATE, 1, 0))
    fresh = Exchange(source.store, sockets_of(inboxes, 0))
    fresh.begin_plan(4, [], [])
    assert fresh._early == []
    source.store.put(HINT, torch.ones(3))
    fresh.begin_plan(4, [Delivery(HINT, 0, 1)], [])
    target.exchange.begin_plan(4, [], [])
    target.exchange.begin_batch(batch("step", HINT))
    target.exchange.wait(HINT)
    assert torch.equal(target.store.get(HINT), torch.ones(3))
    fresh.close()


async def test_a_rank_that_sends_to_a_dead_one_without_room_goes_on(ranks: list[Rank], inboxes: Inboxes) -> None:
    source, _ = ranks
    source.store.put(HINT, torch.ones(1))
    sending = threading.Thread(
        target=source.exchange.begin_plan, args=(3, [Delivery(HINT, 0, 1)] * 5000, []), daemon=True
    )
    sending.start()
    await asyncio.to_thread(sending.join, 0.2)
    assert sending.is_alive(), "the inbox is full, and nobody reads it"
    inboxes.tell(0, gone(1, seq=4))
    await asyncio.to_thread(sending.join, 10)
    assert not sending.is_alive()


async def test_the_engine_never_waits_for_room_in_an_inbox(ranks: list[Rank], inboxes: Inboxes) -> None:
    _, target = ranks
    for seq in range(5000):
        inboxes.tell(1, gone(0, seq))
    assert inboxes._waiting[1], "some found no room"
    async with asyncio.timeout(20):
        while target.exchange._gone.get(0) != 4999:
            target.exchange._receive_all()
            await asyncio.sleep(0.001)
    assert not inboxes._waiting[1]
