"""WaitingQueue: order, ageing, and leaving from the middle."""

from __future__ import annotations

import random

from scheduler_parts import make_request

from aiosched.scheduler.queue import WaitingQueue
from aiosched.scheduler.requests import Request, State


def pop_all(queue: WaitingQueue) -> list[Request]:
    return list(iter(queue.pop, None))


def test_the_smallest_key_comes_first() -> None:
    requests = [make_request(key=(float(i * 7 % 10), i)) for i in range(10)]
    queue = WaitingQueue()
    for request in requests:
        queue.push(request)
        assert request.state is State.QUEUED
    assert pop_all(queue) == sorted(requests, key=lambda r: r.key)
    assert len(queue) == 0


def test_equal_times_keep_the_order_of_arrival() -> None:
    requests = [make_request(key=(1.0, i)) for i in range(20)]
    queue = WaitingQueue()
    for request in reversed(requests):
        queue.push(request)
    assert pop_all(queue) == requests


def test_one_that_returns_keeps_its_place() -> None:
    first, second, third = (make_request() for _ in range(3))
    queue = WaitingQueue()
    for request in (second, third):
        queue.push(request)
    queue.push(first)  # retracted: it was admitted before the others
    assert pop_all(queue) == [first, second, third]


def test_whoever_leaves_is_never_popped_and_not_remembered() -> None:
    draw, queue, waiting = random.Random(1), WaitingQueue(), []
    for _ in range(3000):
        match draw.choice(["push", "remove", "pop"]):
            case "push":
                waiting.append(make_request(1))
                queue.push(waiting[-1])
            case "remove" if waiting:
                queue.remove(waiting.pop(draw.randrange(len(waiting))))
            case "pop":
                expected = waiting.pop(0) if waiting else None
                assert queue.pop() is expected
        assert set(queue) == set(waiting) and len(queue) == len(waiting)
        assert len(queue._heap) <= 2 * len(waiting)


def test_one_that_is_set_aside_counts_but_has_no_turn_until_it_is_put_back() -> None:
    first, second, third = (make_request() for _ in range(3))
    queue = WaitingQueue()
    for request in (first, second, third):
        queue.push(request)
    for _ in range(2):
        queue.set_aside(queue.pop() or third)
    assert len(queue) == 3 and queue.pop() is third and queue.pop() is None
    queue.remove(first)
    for request in (second, first):
        queue.put_back(request)
    assert pop_all(queue) == [second]
    assert len(queue) == 0


def test_removing_a_stranger_does_nothing() -> None:
    queue, request = WaitingQueue(), make_request()
    queue.push(request)
    queue.remove(make_request())
    assert pop_all(queue) == [request]
