"""An order shop with FastAPI: requests start and steer durable orders.

pip install fastapi uvicorn
uvicorn examples.order_shop.app:app

curl localhost:8000/orders --json '{"id": "o-1", "article": "lamp", "cents": 4200}'
curl localhost:8000/orders/o-1
"""

import os

from examples.order_shop import flows
from fastapi import FastAPI, HTTPException

from perdure import Runtime
from perdure.errors import InstanceFinished, NotFound

runtime = Runtime(os.environ.get("SHOP_STORE", "shop.db"), [flows])
app = FastAPI(lifespan=runtime.lifespan)


@app.post("/orders", status_code=202)
async def create(order: flows.Order) -> dict[str, str]:
    """Idempotent: the same id is the same order."""
    handle = await runtime.start(flows.buy, order, id=order.id)
    return {"id": handle.id}


@app.get("/orders/{order_id}")
async def show(order_id: str) -> dict[str, object]:
    try:
        view = await runtime.describe(order_id, waits=False)
    except NotFound as error:
        raise HTTPException(404, str(error)) from error
    return {"status": view.status, "stage": view.custom_status, "result": view.output}


@app.post("/orders/{order_id}/approval")
async def approve(order_id: str, approved: bool) -> dict[str, bool]:
    try:
        await runtime.get(order_id).raise_event("approval", approved)
    except NotFound as error:
        raise HTTPException(404, str(error)) from error
    except InstanceFinished as error:
        raise HTTPException(409, str(error)) from error
    return {"approved": approved}
