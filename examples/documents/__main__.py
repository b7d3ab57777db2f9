"""A document pipeline: one child per document, many pages at once, a summary at the end.

    python -m examples.documents FOLDER [STORE]

Stop it at any moment and start it again with the same arguments: finished pages are not read again.
"""

import asyncio
import sys
from collections import Counter
from pathlib import Path

from perdure import Handler, Runtime, activity, orchestration, set_custom_status

PAGE_LINES = 50


@activity
def list_documents(folder: str) -> list[str]:
    return sorted(str(path) for path in Path(folder).glob("*.txt"))


@activity
def count_pages(document: str) -> int:
    lines = Path(document).read_text().count("\n") + 1
    return -(-lines // PAGE_LINES)


@activity
def count_words(document: str, page: int) -> dict[str, int]:
    lines = Path(document).read_text().splitlines()
    words = " ".join(lines[page * PAGE_LINES : (page + 1) * PAGE_LINES]).lower().split()
    return dict(Counter(words))


@orchestration
async def read_document(document: str) -> dict[str, int]:
    pages = await count_pages(document)
    counts = await asyncio.gather(*[count_words(document, page) for page in range(pages)])
    return dict(sum(map(Counter, counts), Counter()))


@orchestration
async def summarise(folder: str) -> list[tuple[str, int]]:
    documents = await list_documents(folder)
    total: Counter[str] = Counter()
    for done, reading in enumerate(asyncio.as_completed(map(read_document, documents)), 1):
        total.update(await reading)
        set_custom_status(f"{done} of {len(documents)} documents")
    return total.most_common(3)


async def main(folder: str, store: str) -> None:
    handlers: list[Handler] = [summarise, read_document, list_documents, count_pages, count_words]
    async with Runtime(store, handlers) as runtime:
        handle = await runtime.start(summarise, folder, id=f"summary of {folder}")
        for word, count in await handle.result():
            print(f"{count:6} {word}")


if __name__ == "__main__":
    if len(sys.argv) < 2 or not Path(sys.argv[1]).is_dir():
        sys.exit("name a folder with .txt files: python -m examples.documents FOLDER [STORE]")
    asyncio.run(main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "documents.db"))
