"""No bytes make a decoder do anything but decode them or refuse them: no other error, no hang, no great memory.

``pytest -m slow tests/hostile`` fuzzes for minutes, as ``python -m reliability fuzz`` does, which tells how
many inputs that were.
"""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reliability.decoders import DECODERS, Decoder, fuzz
from reliability.forging import tampered_bytes

from tieredckpt.errors import Corrupt

each_decoder = pytest.mark.parametrize("decoder", DECODERS, ids=lambda decoder: decoder.name)


@each_decoder
@settings(max_examples=80)
@given(data=st.data())
def test_whatever_a_decoder_is_given_it_decodes_or_refuses(decoder: Decoder, data: st.DataObject) -> None:
    decoder.meet(data.draw(decoder.inputs))


@pytest.mark.slow
@pytest.mark.timeout(3600)
@each_decoder
@settings(max_examples=3000)
@given(data=st.data())
def test_whatever_a_decoder_is_given_for_a_long_time_it_decodes_or_refuses(
    decoder: Decoder, data: st.DataObject
) -> None:
    decoder.meet(data.draw(decoder.inputs))


@each_decoder
def test_what_is_tampered_with_would_be_decoded_as_it_was(decoder: Decoder) -> None:
    decoder.decode(decoder.sound)


def test_a_decoder_of_ones_own_is_fuzzed_and_found_out() -> None:
    def careless(data: bytes) -> int:
        if len(data) < 4:
            raise Corrupt("too short")
        return 1 // (data[2] ^ 0x80)

    assert fuzz(Decoder("careful", lambda data: careless(data + bytes(4)[len(data) :]), b"abcd", st.just(b"abcd")), 5)
    with pytest.raises(ZeroDivisionError):
        fuzz(Decoder("careless", careless, b"abcd", tampered_bytes(b"abcd")), 2000)
