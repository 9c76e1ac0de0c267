"""What the tests of this library, and those of anybody who extends it, are made of.

`blobs` holds a blob store to its contract, `policies` a policy and `coordinators` a coordinator of ranks to theirs.
`faulty` is a blob store that fails by script, `memory` one in memory, `backdoor` reaches past one; `system` makes
calls of the operating system fail; `ranks` is a training of several ranks in one process. `journal` notes what is
done to the media and tells what crashes leave of them, `replay` and `ranks_replay` hold a store to its promises after
each, `kills` after the death of real trainers, `soak` under random faults, `sweep` as each call of the system fails;
`decoders` has hostile input for all that is read. ``python -m tieredckpt.testing`` runs them. Needs the packages of
the extra ``test``.
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
