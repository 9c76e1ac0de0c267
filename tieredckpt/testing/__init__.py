"""What the tests of this library, and those of anybody who extends it, are made of.

`blobs` holds a blob store to its contract, `policies` a policy and `coordinators` a coordinator of ranks to theirs;
`faulty` is a blob store that fails by script, `backdoor` reaches past one, `ranks` is a training of several ranks in
one process. Needs the packages of the extra ``test``.
"""

from __future__ import annotations

import pytest

# Before they are imported: a failed assertion then shows its values, as in a test file.
pytest.register_assert_rewrite(
    "tieredckpt.testing.backdoor",
    "tieredckpt.testing.blobs",
    "tieredckpt.testing.coordinators",
    "tieredckpt.testing.policies",
)

__all__: list[str] = []
