"""One standby after another takes over from a writer killed at full speed: every batch counts once."""

from __future__ import annotations

from pathlib import Path

from keyfold import Changelog, restore
from keyfold.checkpoints.verify.verify import verify
from support.soaking import Soak, in_rounds
from support.standby_writers import APP, Relay, model, prepared


def test_over_fifty_takeovers_no_batch_is_lost_and_none_comes_twice(tmp_path: Path, soak: bool) -> None:
    takeovers = 100 if soak else 50

    def take_over(seed: int, figures: Soak) -> None:
        look(tmp_path / "log", seed, takeovers)
        figures.count("kills of a writer with standbys", takeovers)

    in_rounds("standbys", 0, take_over, soak=soak)


def look(path: Path, seed: int, takeovers: int) -> None:
    prepared(path)
    relay = Relay(path, seed)
    relay.run(takeovers)

    lines = [line.split() for line in relay.told.read_text().splitlines()]
    writers = [(int(pid), int(last)) for kind, pid, last in lines if kind == "writer"]
    batches = [int(batch) for kind, _, batch in lines if kind == "batch"]
    assert len({pid for pid, _ in writers}) == takeovers + 1
    # A batch that was acknowledged and then lost would be done again by the next writer.
    assert batches == sorted(set(batches))
    # Whoever takes over knows all that was acknowledged before, and goes on right behind it.
    acknowledged = -1
    for kind, _, number in lines:
        if kind == "writer":
            assert acknowledged <= int(number) <= acknowledged + 1
        else:
            assert int(number) in (acknowledged + 1, acknowledged + 2)
            acknowledged = int(number)

    assert verify(path).damages == []
    restored = restore(path).to_dict()
    with Changelog.open(path) as log:
        last = log.last_batch(APP)
        assert last is not None
        assert acknowledged <= last <= acknowledged + 1
        state, records = model(last + 1)
        assert restored == state
        assert dict(log.store().all()) == state
        assert log.state.next_commit == last + 2
        assert sum(log.end_offsets().values()) == records
        assert [p.name for p in (path / "work").iterdir() if p.name.startswith("standby-")] == []
        assert len(list(path.glob("store-*"))) == 1
    print(f"{takeovers} takeovers, {last + 1} batches, {records} records")
