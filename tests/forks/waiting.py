"""Says that it runs, and waits for a signal: `python -m tests.forks.waiting`."""

import signal

if __name__ == "__main__":
    print("it waits", flush=True)
    signal.pause()
