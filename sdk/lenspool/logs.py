"""What lenspool says of its work, for programs that have no logging of their own."""

from __future__ import annotations

import json
import logging
import sys

from lenspool.errors import InvalidJob

LOGGERS = ("lenspool", "lenspool_cache", "lenspool_worker")
_NAME = "lenspool-console"


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {
            "time": self.formatTime(record, "%Y-%m-%dT%H:%M:%S%z"),
            "level": record.levelname,
            "logger": record.name,
            "message": record.getMessage(),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)


def configure_logging(level: int | str = "INFO", *, as_json: bool = False) -> None:
    """Write the log of lenspool's packages to stderr; called again, it changes that.

    Other loggers and the root logger are left alone, and these records do not reach them as well: each is written once.

    Parameters
    ----------
    level
        `"DEBUG"`, `"INFO"`, `"WARNING"`, `"ERROR"`, or a number.
    as_json
        One JSON object per line, with `time`, `level`, `logger`, `message` and `exception`.

    Raises
    ------
    InvalidJob
        There is no such level.
    """
    names = logging.getLevelNamesMapping()
    wanted = names.get(level.upper()) if isinstance(level, str) else level
    if not isinstance(wanted, int) or isinstance(wanted, bool):
        raise InvalidJob("level", f"got {level!r}", ", ".join(names))
    handler = logging.StreamHandler(sys.stderr)
    handler.name = _NAME
    plain = logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s")
    handler.setFormatter(_JsonLines() if as_json else plain)
    for name in LOGGERS:
        logger = logging.getLogger(name)
        for old in [h for h in logger.handlers if h.name == _NAME]:
            logger.removeHandler(old)
        logger.addHandler(handler)
        logger.setLevel(wanted)
        logger.propagate = False
