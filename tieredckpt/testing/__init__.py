"""Conformance suites for your own stores, policies and communicators, and stores that fail by script.

`blobs` tests a blob store, `policies` a policy, `communicators` a communicator of ranks. `faulty` wraps a working blob
store in one that fails by script; `tiers` puts such stores under the tiers of a whole store. `backdoor` accesses data
past a store. `devices` is a GPU without hardware. Needs the packages of the extra ``test``.
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
