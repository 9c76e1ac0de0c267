"""The Python face of the client of CHFS, in the process of its own that libchfs wants."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from support import lookalike

pytestmark = pytest.mark.skipif(bool(lookalike.missing()), reason="tieredckpt was installed without its CHFS client")

_PROGRAM = """
import os, sys, threading, time
from tieredckpt._chfs import ChfsError, Client

library, folder = sys.argv[1:]

def switch(text):
    with open(folder + "/new", "w") as file:
        file.write(text)
    os.rename(folder + "/new", folder + "/switches")

SIZE = (16 << 20) + 1  # two calls of libchfs

client = Client(library, "directory:" + folder)
for name, byte in (("/one", b"1"), ("/two", b"2")):
    file = client.create(name, 1 << 20)
    file.write(byte * SIZE, 0)
    file.close()

one = client.open_object("/one")
got = bytearray(SIZE)
switch("hang.pread = 2")
reading = threading.Thread(target=one.read_into, args=(got, 0))
reading.start()
while not got[0]:
    time.sleep(0.001)
closing = threading.Thread(target=one.close)
closing.start()
closing.join(0.1)
waited = closing.is_alive()
two = client.open_object("/two")  # which must not get the descriptor
switch("")
reading.join()
closing.join()
try:
    one.read_into(got, 0)
    refused = False
except ChfsError as error:
    refused = error.args[0] == "invalid"
print(waited, refused, bytes(got) == b"1" * SIZE)
"""


def test_closing_an_object_waits_for_the_reads_of_other_threads(tmp_path: Path) -> None:
    library = lookalike.library()
    assert library is not None
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(library), str(tmp_path / "servers")],
        capture_output=True, text=True, check=False, timeout=60,
    )  # fmt: skip
    assert done.stdout.split() == ["True", "True", "True"], done.stderr
