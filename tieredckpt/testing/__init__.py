"""Suites that hold your own parts to their contracts, and stores that fail by script.

`blobs` tests a blob store, `policies` a policy, `communicators` a communicator of ranks. `faulty` is a blob store that
fails by script around one that works, which `tiers` puts under the tiers of a whole store; `backdoor` reaches past a
store. `devices` is a GPU without hardware. Needs the packages of the extra ``test``.
"""

from __future__ import annotations

import pytest

# Before they are imported: a failed assertion then shows its values, as in a test file.
pytest.register_assert_rewrite(
    "tieredckpt.testing.backdoor",
    "tieredckpt.testing.blobs",
    "tieredckpt.testing.communicators",
    "tieredckpt.testing.policies",
)

__all__: list[str] = []
