"""The orders that the demo starts, and the end that each must have."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from examples.demo import shop


@dataclass(frozen=True)
class Case:
    """One instance of the plan."""

    kind: str
    id: str
    orchestration: Any
    arguments: tuple[Any, ...]
    expected: Any
    approve: bool = False
    """A manager says yes to it while it waits."""


def make_plan() -> list[Case]:
    return [
        *_orders("small order", 8, "parcel-{}", items=["pen", "ink"], cents=1200),
        *_orders("bank times out", 6, "parcel-{}", items=["book"], cents=2500, card="flaky"),
        *_orders(
            "big order, approved", 4, "parcel-{}", approve=True, items=["desk", "lamp"], cents=90000
        ),
        *_orders(
            "big order, ignored", 3, "undone: not approved in time", items=["yacht"], cents=990000
        ),
        *_orders("out of stock", 4, "undone: no unicorn left", items=["pen", "unicorn"], cents=700),
        *_orders(
            "card declined",
            4,
            "undone: the card was declined",
            items=["pen", "rug", "hat"],
            cents=8000,
            card="stolen",
        ),
        *_refunds(4),
        *(
            Case("subscription", f"sub-{number}", shop.subscription, (f"sub-{number}", 6), 6)
            for number in range(1, 4)
        ),
        Case("stocktaking", "stock-1", shop.stocktaking, (120,), sum(n % 7 for n in range(120))),
    ]


def _orders(
    kind: str, count: int, expected: str, *, approve: bool = False, **fields: Any
) -> list[Case]:
    slug = kind.replace(",", "").replace(" ", "-")
    ids = [f"{slug}-{number}" for number in range(1, count + 1)]
    return [
        Case(
            kind,
            order_id,
            shop.take_order,
            (shop.Order(id=order_id, **fields),),
            expected.format(order_id),
            approve,
        )
        for order_id in ids
    ]


def _refunds(count: int) -> list[Case]:
    ids = [f"refund-{number}" for number in range(1, count + 1)]
    orders = [shop.Order(id=order_id, items=["unicorn"], cents=300) for order_id in ids]
    return [
        Case("change of mind", order.id, shop.change_of_mind, (order,), "refunded")
        for order in orders
    ]
