"""moto's server of S3's protocol, whose puts are atomic: ``python atomic_moto.py`` with its arguments.

By itself moto looks whether an object is there and puts it later, so that of two conditional puts that come at a time
both may succeed; and it fails to abort an upload of which a part is arriving.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from moto.s3.models import S3Backend
from moto.s3.responses import S3Response
from moto.server import main

_one_at_a_time = threading.RLock()


def _alone(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def alone(*arguments: Any, **named: Any) -> Any:
        with _one_at_a_time:
            return function(*arguments, **named)

    return alone


for _kind, _name in (
    (S3Response, "put_object"),
    (S3Backend, "upload_part"),
    (S3Backend, "abort_multipart_upload"),
):
    setattr(_kind, _name, _alone(getattr(_kind, _name)))

if __name__ == "__main__":
    main()
