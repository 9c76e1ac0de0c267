"""Ranks that leave messages for each other meet whatever was left before, and whatever fails for a while."""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.limits import limit

from tieredckpt.blobs.posix.store import PosixStore
from tieredckpt.engine.ranks.communicator import RanksMissing, exchange
from tieredckpt.engine.transport import mailbox
from tieredckpt.engine.transport.mailbox import Mailbox
from tieredckpt.engine.transport.shared import SharedStore
from tieredckpt.errors import Closed, RanksUnavailable, TieredCkptError, TierUnavailable
from tieredckpt.testing.faulty import Faulty

ENOUGH = 20.0


class Office:
    """A carrier in memory, that refuses by script."""

    def __init__(self) -> None:
        self.mailboxes: dict[str, dict[str, bytes]] = {}
        self.refuse: Callable[[str, str], TieredCkptError | None] = lambda verb, mailbox: None

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        self._check("put", mailbox)
        self.mailboxes.setdefault(mailbox, {})[name] = message

    async def take(self, mailbox: str) -> list[bytes]:
        self._check("take", mailbox)
        return list(self.mailboxes.pop(mailbox, {}).values())

    async def drop(self, mailbox: str) -> None:
        self.mailboxes.pop(mailbox, None)

    async def close(self) -> None:
        pass

    def _check(self, verb: str, mailbox: str) -> None:
        if (error := self.refuse(verb, mailbox)) is not None:
            raise error


@pytest.fixture
def office() -> Office:
    return Office()


def mailboxes(office: Office, size: int = 3) -> list[Mailbox]:
    return [Mailbox(office, rank=rank, size=size) for rank in range(size)]


async def meet(ranks: list[Mailbox]) -> None:
    await asyncio.gather(*(each.open(timeout=ENOUGH) for each in ranks))


async def close(ranks: list[Mailbox]) -> None:
    await asyncio.gather(*(each.close() for each in ranks))


async def speak(ranks: list[Mailbox], topic: str) -> None:
    said = await asyncio.gather(*(exchange(each, topic, bytes([each.rank]), timeout=ENOUGH) for each in ranks))
    assert said == [[bytes([rank]) for rank in range(len(ranks))]] * len(ranks)


async def test_a_thousand_messages_leave_nothing_behind(office: Office) -> None:
    ranks = mailboxes(office)
    await meet(ranks)
    for number in range(250):
        await speak(ranks, str(number))  # four messages each
    assert office.mailboxes == {}
    await close(ranks)
    assert office.mailboxes == {}


async def test_a_long_message_goes_in_letters_that_every_store_takes(office: Office) -> None:
    ranks = mailboxes(office)
    await meet(ranks)
    for nbytes in (1 << 20, (1 << 20) + 1, 3 << 20):
        data = os.urandom(nbytes)
        await ranks[0].send([1, 2], f"{nbytes}", data)
        lengths = [len(message) for mailbox in office.mailboxes.values() for message in mailbox.values()]
        assert max(lengths) < (1 << 20) + 1024
        for each in ranks[1:]:
            mailbox = office.mailboxes[f"{each.rank}-{each._endpoint}"]
            for name in reversed([*mailbox]):  # stores keep no order
                mailbox[name] = mailbox.pop(name)
            assert await each.recv(0, f"{nbytes}", timeout=ENOUGH) == data
    await close(ranks)


async def test_who_waits_long_looks_seldom_and_who_waits_shortly_does_not_wait_longer(office: Office) -> None:
    looks = 0

    def count(verb: str, mailbox: str) -> None:
        nonlocal looks
        looks += verb == "take"

    ranks = mailboxes(office, 2)
    await meet(ranks)
    office.refuse = count
    with pytest.raises(RanksUnavailable):
        await ranks[1].recv(0, "nothing", timeout=1.0)
    assert looks < 120  # 500 at the pace of the beginning
    taking = asyncio.create_task(ranks[1].recv(0, "something", timeout=ENOUGH))
    await asyncio.sleep(0.02)
    begin = looks
    await ranks[0].send([1], "something", b"")
    await taking
    assert looks - begin <= 5
    await close(ranks)


class Dying(Office):
    """The same office for a process that comes no further after so many calls."""

    def __init__(self, office: Office, calls: int) -> None:
        super().__init__()
        self.mailboxes = office.mailboxes
        self.left = calls
        self.died = asyncio.Event()

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        await self._live()
        await super().put(mailbox, name, message)

    async def take(self, mailbox: str) -> list[bytes]:
        await self._live()
        return await super().take(mailbox)

    async def _live(self) -> None:
        self.left -= 1
        if self.left < 0:
            self.died.set()
            await asyncio.get_running_loop().create_future()


async def met_or_looked(office: Office, opening: dict[int, asyncio.Task[None]]) -> None:
    """Wait until ranks have met, or have looked so often that they will not by what is there."""
    looks: Counter[str] = Counter()

    def count(verb: str, mailbox: str) -> None:
        looks[f"{verb} {mailbox.partition('-')[0]}"] += 1

    office.refuse = count
    async with asyncio.timeout(ENOUGH):
        while any(looks[f"take {rank}"] < 10 and not each.done() for rank, each in opening.items()):
            await asyncio.sleep(0.001)
    office.refuse = lambda verb, mailbox: None


@pytest.mark.parametrize("died", range(3))
@pytest.mark.parametrize("calls", range(8))
async def test_wherever_a_rank_dies_while_they_meet_its_next_process_meets_the_others(
    office: Office, died: int, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    limit(monkeypatch, hello_again=0.03, go_within=0.1)
    ranks = mailboxes(office)
    dying = Dying(office, calls)
    dead = ranks[died] = Mailbox(dying, rank=died, size=3)
    opening = [asyncio.create_task(each.open(timeout=ENOUGH)) for each in ranks]
    death = asyncio.create_task(dying.died.wait())
    await asyncio.wait([opening[died], death], return_when=asyncio.FIRST_COMPLETED)
    await met_or_looked(office, {rank: each for rank, each in enumerate(opening) if rank != died})
    death.cancel()
    opening[died].cancel()
    for rank in range(3):  # who has met the dead must be started again as well
        if rank == died or opening[rank].done():
            ranks[rank] = Mailbox(office, rank=rank, size=3)
            opening[rank] = asyncio.create_task(ranks[rank].open(timeout=ENOUGH))
    await asyncio.gather(*opening)
    await speak(ranks, "after all")
    assert dead not in ranks
    await close(ranks)


class Slow(Office):
    """An office far from rank 0."""

    async def put(self, mailbox: str, name: str, message: bytes) -> None:
        if mailbox != "hello" and not mailbox.startswith("0-"):
            await asyncio.sleep(0.03)
        await super().put(mailbox, name, message)

    async def take(self, mailbox: str) -> list[bytes]:
        if mailbox.startswith("0-"):
            await asyncio.sleep(0.03)
        return await super().take(mailbox)


async def test_no_hello_is_left_for_the_next_session(monkeypatch: pytest.MonkeyPatch) -> None:
    limit(monkeypatch, hello_again=0.0)  # they go on until they hear of their welcome
    office = Slow()
    ranks = mailboxes(office)
    await meet(ranks)
    assert "hello" not in office.mailboxes
    await close(ranks)


async def test_an_endpoint_that_a_dead_process_left_gives_way_to_the_living(office: Office) -> None:
    dead = mailboxes(office)
    leaving = asyncio.gather(*(each.open(timeout=2.0) for each in dead[1:]), return_exceptions=True)
    assert all(isinstance(outcome, RanksUnavailable) for outcome in await leaving)
    assert len(office.mailboxes["hello"]) == 2
    ranks = mailboxes(office)
    leading = asyncio.create_task(ranks[0].open(timeout=ENOUGH))
    await asyncio.sleep(0.1)  # it has welcomed the dead
    await asyncio.gather(leading, *(each.open(timeout=ENOUGH) for each in ranks[1:]))
    await speak(ranks, "alive")
    await close(ranks)
    assert office.mailboxes == {}


async def test_the_leader_names_who_was_welcomed_and_did_not_answer(office: Office) -> None:
    dead = mailboxes(office)
    await asyncio.gather(dead[2].open(timeout=1.0), return_exceptions=True)
    ranks = mailboxes(office)
    outcomes = await asyncio.gather(*(each.open(timeout=3.0) for each in ranks[:2]), return_exceptions=True)
    assert isinstance(outcomes[0], RanksMissing)
    assert outcomes[0].ranks == (2,)
    assert isinstance(outcomes[1], RanksUnavailable)
    for outcome in outcomes:  # ranks with other paths never meet
        assert "its tiers at the same paths" in str(outcome)


async def test_a_cancellation_that_comes_with_the_carriers_answer_is_not_lost(
    office: Office, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answer = asyncio.Event(), asyncio.get_running_loop().create_future()

    async def put(mailbox: str, name: str, message: bytes) -> None:
        asked.set()
        await answer

    monkeypatch.setattr(office, "put", put)
    rank = mailboxes(office)[1]
    opening = asyncio.create_task(rank.open(timeout=ENOUGH))
    await asked.wait()
    answer.set_result(None)
    opening.cancel()
    ended, _ = await asyncio.wait([opening], timeout=ENOUGH)  # a rank that heard nothing of it goes on looking
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert ended
    await rank.close()


async def test_what_fails_for_a_while_only_delays(office: Office) -> None:
    ranks = mailboxes(office)
    await meet(ranks)
    failures = iter(range(20))

    def refuse(verb: str, mailbox: str) -> TieredCkptError | None:
        fails = verb == "take" and next(failures, None) is not None
        return TierUnavailable("the tier does not answer, by script") if fails else None

    office.refuse = refuse
    await speak(ranks, "in spite of it")
    assert next(failures, None) is None
    await close(ranks)


async def test_the_error_of_a_silent_rank_tells_what_keeps_messages_from_coming(office: Office) -> None:
    ranks = mailboxes(office)
    await meet(ranks)
    office.refuse = lambda verb, mailbox: TierUnavailable("no such server, by script")
    with pytest.raises(RanksUnavailable, match="no such server"):
        await ranks[0].recv(1, "word", timeout=0.1)
    with pytest.raises(RanksUnavailable, match="no such server"):
        await ranks[0].send([1], "word", b"")
    office.refuse = lambda verb, mailbox: None
    await close(ranks)


async def test_a_close_in_the_moment_of_a_look_ends_who_waits(office: Office) -> None:
    ranks = mailboxes(office, 2)
    await meet(ranks)
    closing: list[asyncio.Task[None]] = []

    def end(verb: str, mailbox: str) -> None:
        if verb == "take" and not closing:
            closing.append(asyncio.create_task(ranks[1].close()))  # it runs when the look has just ended

    office.refuse = end
    with pytest.raises(Closed):
        await ranks[1].recv(0, "never", timeout=ENOUGH)
    await closing[0]
    await ranks[0].close()


async def test_letters_that_are_not_of_the_session_are_dropped(office: Office) -> None:
    ranks = mailboxes(office)
    await meet(ranks)
    (stolen,) = await _letters_of(ranks[0], office)
    await close(ranks)
    others = mailboxes(office)
    await meet(others)
    mailbox = f"1-{others[1]._endpoint}"
    await others[0].send([1], "word", b"of this session")
    no_text = b"\x93\xa4post\xa1\xff\x00"
    office.mailboxes[mailbox].update(old=stolen, junk=b"\xc1 no message", empty=b"", no_text=no_text)
    assert await others[1].recv(0, "word", timeout=5) == b"of this session"
    with pytest.raises(RanksUnavailable):
        await others[1].recv(0, "word", timeout=0.2)
    assert mailbox not in office.mailboxes
    await close(others)


async def _letters_of(rank: Mailbox, office: Office) -> list[bytes]:
    await rank.send([1], "word", b"of another session")
    return [message for mailbox in office.mailboxes.values() for message in mailbox.values()]


# -- over a folder ------------------------------------------------------------------------------------------


def in_folder(folder: Path, stores: list[Faulty]) -> list[Mailbox]:
    """Two ranks."""

    async def open_store() -> Faulty:
        store = Faulty(await asyncio.to_thread(PosixStore, folder, fsync=False))
        stores.append(store)
        return store

    return [SharedStore(open_store, rank=rank, size=2) for rank in range(2)]


async def test_a_letter_that_is_still_being_written_is_taken_when_it_is_whole(tmp_path: Path) -> None:
    ranks = in_folder(tmp_path, [])
    await meet(ranks)
    await ranks[0].send([1], "word", b"complete")
    (path,) = (path for path in tmp_path.rglob("*") if path.is_file())
    whole = path.read_bytes()
    path.write_bytes(whole[:-3])
    with pytest.raises(RanksUnavailable):
        await ranks[1].recv(0, "word", timeout=0.3)
    path.write_bytes(whole)
    assert await ranks[1].recv(0, "word", timeout=ENOUGH) == b"complete"
    await close(ranks)


@pytest.mark.parametrize("after", [False, True], ids=["not done", "done"])
@pytest.mark.parametrize("verb", ["get", "delete", "list"])
async def test_no_letter_is_lost_or_taken_twice_when_the_store_fails(tmp_path: Path, verb: str, after: bool) -> None:
    stores: list[Faulty] = []
    ranks = in_folder(tmp_path, stores)
    await meet(ranks)
    for number in range(6):
        await ranks[0].send([1], f"word {number}", bytes([number]))
    for store in stores:
        store.fail(verb, TierUnavailable("no answer, by script"), nth=2, times=3, after=after)
    for number in range(6):
        assert await ranks[1].recv(0, f"word {number}", timeout=ENOUGH) == bytes([number])
    for number in range(6):
        with pytest.raises(RanksUnavailable):
            await ranks[1].recv(0, f"word {number}", timeout=0.05)
    await close(ranks)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


async def test_letters_of_jobs_that_died_are_swept_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    old, young = (tmp_path / "ranks" / "tieredckpt" / f"1-{name}" / "0-0" for name in ("old", "young"))
    for path in (old, young):
        path.parent.mkdir(parents=True)
        path.write_bytes(b"left behind")
    os.utime(old, (1_000_000_000, 1_000_000_000))
    ranks = in_folder(tmp_path, [])
    await meet(ranks)
    assert not old.exists()
    assert young.exists()
    await close(ranks)


async def test_a_letter_of_a_host_whose_clock_is_wrong_is_not_swept(tmp_path: Path) -> None:
    ranks = in_folder(tmp_path, [])
    await meet(ranks)
    await ranks[0].send([1], "word", b"in time")
    (message,) = (path for path in tmp_path.rglob("*") if path.is_file())
    os.utime(message, (1_000_000_000, 1_000_000_000))
    young = tmp_path / "ranks" / "tieredckpt" / "1-young" / "0-0"
    young.parent.mkdir(parents=True)
    young.write_bytes(b"left behind")
    leader = ranks[0]
    assert isinstance(leader, SharedStore)
    await leader._objects.sweep(spare=leader.mailboxes)
    assert await ranks[1].recv(0, "word", timeout=ENOUGH) == b"in time"
    await close(ranks)


async def test_a_rank_that_sends_looks_for_an_answer_at_once(office: Office, monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = [Mailbox(office, rank=rank, size=2, slowest=600.0) for rank in range(2)]
    await meet(ranks)
    monkeypatch.setattr(mailbox, "_PATIENCE", 1e4)  # from its second look on, a rank waits for minutes
    waiting = asyncio.create_task(ranks[1].recv(0, "answer", timeout=ENOUGH))
    await asyncio.sleep(0.2)
    await ranks[0].send([1], "answer", b"yes")
    await ranks[1].send([0], "question", b"?")
    assert await waiting == b"yes"
    await close(ranks)
