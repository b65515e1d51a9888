"""``akv trace`` tells from event logs what happened to a request, and why."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from akv.trace.chrome import chrome_trace
from akv.trace.numbers import summarise
from akv.trace.page import html_page
from akv.trace.reading import Log, LogError, read_logs
from akv.trace.story import Stories, tell
from akv.trace.text import facts, records_of, story_lines, summary_lines

if TYPE_CHECKING:
    import argparse

    from akv.cli.command import Commands

__all__ = ("add_command", "run")


def add_command(commands: Commands) -> None:
    """Add ``akv trace`` to the commands of a parser."""
    parser = commands.add_parser(
        "trace",
        help="tell what happened to a request, and why it was not served",
        description="Reads event logs (the setting log_events) and tells of one "
        "request how many tokens were asked for, found, promised and loaded, where "
        "the time went, and why it was not more; or of all requests the rates, "
        "percentiles and the slowest ones; or draws them. The scheduler and the "
        "worker of an engine may write to one file or to one each: give all of them. "
        "PATH.1, in which a file goes on backwards, is read by itself. A log that "
        "ends in the middle of a line is read up to there. Exit status 0, or 1 if a "
        "file or a request is not there.",
        epilog="example: akv trace events.jsonl --request cmpl-7   "
        "(why was it not served?)   "
        "example: akv trace scheduler.jsonl worker.jsonl --html trace.html",
    )
    parser.add_argument("files", nargs="+", metavar="FILE", help="an event log")
    parser.add_argument(
        "--request",
        metavar="ID",
        help="tell of this request; the beginning of its id is enough",
    )
    parser.add_argument(
        "--summary", action="store_true", help="tell of all requests (the default)"
    )
    parser.add_argument(
        "--chrome", metavar="OUT.json", help="write a timeline for ui.perfetto.dev"
    )
    parser.add_argument(
        "--html",
        metavar="OUT.html",
        help="write one page with the timeline, the hit ratio and every request "
        "(needs plotly: pip install 'akv-connector[trace]')",
    )
    parser.add_argument(
        "--json", action="store_true", help="one JSON object instead of lines"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Read, print and write.

    :raises LogError: a file or a request is not there, or a file cannot be written
    :raises MissingExtraError: a page was asked for and plotly is not installed
    """
    logs = {Path(name).resolve() for name in options.files}
    for written in (options.chrome, options.html):
        if written and Path(written).resolve() in logs:
            raise LogError(
                f"{written} is the log itself: give the picture another name"
            )
    log = read_logs(options.files)
    stories = tell(log)
    if options.request is not None:
        _tell_one(options, log, stories)
    pictures = options.chrome or options.html
    if options.summary or not (pictures or options.request is not None):
        _tell_all(options, log, stories)
    if options.chrome:
        _write(options.chrome, json.dumps(chrome_trace(log, stories)))
    if options.html:
        title = ", ".join(Path(name).name for name in options.files)
        summary = summarise(stories, seconds=_seconds(log))
        _write(options.html, html_page(log, stories, summary, title=title))
    return 0


def _tell_all(options: argparse.Namespace, log: Log, stories: Stories) -> None:
    summary = summarise(stories, seconds=_seconds(log))
    if options.json:
        print(json.dumps(asdict(summary), indent=2))
        return
    print("\n".join(summary_lines(summary)))
    if log.unreadable or log.unknown:
        print(
            f"\n{log.unreadable} lines could not be read, {log.unknown} events are of "
            "another version"
        )


def _tell_one(options: argparse.Namespace, log: Log, stories: Stories) -> None:
    told = stories.of(options.request)
    if options.json:
        print(json.dumps([facts(one, stories.background) for one in told], indent=2))
        return
    for number, story in enumerate(told):
        if len(told) > 1:
            print(f"{number + 1} of {len(told)} with this id:")
        lines = story_lines(
            story,
            stories.background,
            records_of(story, log),
            of_day=log.time_of_day,
        )
        print("\n".join(lines))
        if number + 1 < len(told):
            print()


def _seconds(log: Log) -> float:
    return log.records[-1].at - log.records[0].at if log.records else 0.0


def _write(path: str, text: str) -> None:
    try:
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise LogError(f"{path} cannot be written: {error.strerror}") from error
    print(f"wrote {path}, {len(text.encode()):,} bytes")
