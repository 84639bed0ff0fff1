"""`python -m widefield` is the command `widefield`: the same entry, which finds the same modules.

It begins before anything is imported, so that Ctrl-C during imports ends the process in one line.
"""

import os
import signal
import sys


def entry() -> None:
    """The command's entry.  It ends the process with the command's status."""
    forget_the_folder()
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, _interrupted)
    from widefield.cli import main

    if "RANK" in os.environ:
        from widefield.launchers._scratch import use_own_folder

        use_own_folder(os.environ)
    sys.excepthook = _without_secrets
    sys.exit(main())


def forget_the_folder() -> None:
    """Take the current folder off sys.path, where `python -m` puts it first: a yaml.py there would hide the installed one.

    A user's modules are found there all the same (own_code.py).  A checkout that is not installed stays, behind all others.
    """
    here = os.getcwd()
    if sys.path and sys.path[0] in ("", here) and not sys.flags.safe_path:
        del sys.path[0]
        if os.path.dirname(os.path.dirname(os.path.abspath(__file__))) == here and here not in sys.path:
            sys.path.append(here)


def _without_secrets(kind, error, trace) -> None:  # type: ignore[no-untyped-def]  # as below
    """Print a traceback as Python does, with `***` in place of what is secret in its message."""
    import traceback

    from widefield.redaction import redacted

    print(redacted("".join(traceback.format_exception(kind, error, trace))), end="", file=sys.stderr)


def _interrupted(number, frame) -> None:  # type: ignore[no-untyped-def]  # `types` would be one more import
    """Ctrl-C: KeyboardInterrupt, and in an import the end at once, for libraries turn it into errors of their own there."""
    while frame is not None:
        if frame.f_code.co_filename == "<frozen importlib._bootstrap>":
            os.write(2, b"widefield: ended at once, as it was still loading\n")
            os._exit(128 + number)
        frame = frame.f_back
    raise KeyboardInterrupt


if __name__ == "__main__":
    entry()
