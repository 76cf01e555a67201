"""The ring under stress: nothing lost or out of order, and what an item costs.

    python tools/bench/ring.py [--items 10000000] [--capacity 8] [--json]

One thread pushes numbers and another pops them; each must be the one that follows. Then push and
pop of one thread alone, which is what they cost where the interpreter's lock stays put.
"""

from __future__ import annotations

import threading
import time

import common

from headrace.runtime.ring import Ring


def main() -> None:
    parser = common.parser(__doc__)
    parser.add_argument("--items", type=int, default=10_000_000)
    parser.add_argument("--capacity", type=int, default=8)
    args = parser.parse_args()
    result = {
        "items": args.items,
        "capacity": args.capacity,
        "between_threads_us": between_threads_us(args.items, args.capacity),
        "alone_us": alone_us(min(args.items, 1_000_000), args.capacity),
    }
    lines = [
        f"{args.items} items in order through {args.capacity} slots",
        f"push + pop between two threads  {result['between_threads_us']:.2f} us",
        f"push + pop on one thread        {result['alone_us']:.2f} us",
    ]
    common.show(common.report(result), lines, as_json=args.json)


def between_threads_us(count: int, capacity: int) -> float:
    """Wall time an item."""
    ring: Ring[int] = Ring(capacity)

    def produce() -> None:
        for number in range(count):
            ring.push(number)
        ring.close()

    thread = threading.Thread(target=produce)
    start = time.perf_counter()
    thread.start()
    expected = 0
    for number in ring:
        assert number == expected, f"{number} came in the place of {expected}"
        expected += 1
    elapsed_s = time.perf_counter() - start
    thread.join()
    assert expected == count, f"{count - expected} of {count} items were lost"
    return elapsed_s * 1e6 / count


def alone_us(count: int, capacity: int) -> float:
    """A full ring at a time."""
    ring: Ring[int] = Ring(capacity)
    rounds = -(-count // capacity)
    start = time.perf_counter()
    for _ in range(rounds):
        for number in range(capacity):
            ring.push(number)
        for _ in range(capacity):
            ring.pop()
    return (time.perf_counter() - start) * 1e6 / (rounds * capacity)


if __name__ == "__main__":
    main()
