"""What is known of the packs of a tier."""

from __future__ import annotations

from tieredckpt.engine.tier.packs import Packs
from tieredckpt.format.ocdbt import Extent

DIGEST = bytes(16)


def test_a_doubted_chunk_stays_so_when_the_packs_are_read_again_as_long_as_one_has_it() -> None:
    packs, read = Packs(), Packs()
    for each in packs, read:
        each.index.update({DIGEST: Extent("packs/a", 0, 64)})
    packs.doubt([DIGEST])
    packs.exchange(read)
    assert packs.doubted == {DIGEST}
    packs.exchange(Packs())
    assert not packs.doubted
