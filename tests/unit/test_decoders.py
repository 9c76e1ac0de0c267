"""Types are decoded by many threads at once, from the first time on, and no process dies of it."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import sys, threading
import msgspec
from tieredckpt._decoders import converted, json_decoder, msgpack_decoder

sys.setswitchinterval(1e-7)
for turn in range(400):
    inner = msgspec.defstruct(f"Inner{turn}", [(f"x{n}", int | None) for n in range(20)])
    outer = msgspec.defstruct(f"Outer{turn}", [(f"f{n}", dict[str, inner] | None, None) for n in range(30)])
    value = {"f29": {"a": {f"x{n}": n for n in range(20)}}}
    ways = [
        lambda: json_decoder(outer).decode(msgspec.json.encode(value)),
        lambda: msgpack_decoder(outer).decode(msgspec.msgpack.encode(value)),
        lambda: converted(value, outer),
        lambda: json_decoder(list[inner]).decode(b"[]"),
    ]
    together, found = threading.Barrier(len(ways)), []

    def decode(way):
        together.wait()
        found.append(way())

    threads = [threading.Thread(target=decode, args=(way,)) for way in ways]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(each == [] or each.f29["a"].x19 == 19 for each in found) == len(ways), found
print("all decoded")
"""


def test_threads_that_decode_a_type_for_the_first_time_crash_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "all decoded\n"), done.stderr
