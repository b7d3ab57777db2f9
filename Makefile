# Every target sets up what it needs: a virtual environment in .venv and the packages by name.
SHELL := /bin/bash
# The newest Python from 3.11 on that is installed and can create virtual environments.
# Another one: make demo PYTHON=/path/to/python
PYTHON ?= $(shell for name in python3.{11..30} python3 python; do \
	"$$name" -c 'import ensurepip, sys; sys.version_info < (3, 11) and sys.exit(1); \
	print(sys.version_info[1], sys.executable)' 2>/dev/null; \
	done | sort -s -k1,1rn | head -n 1 | cut -d ' ' -f 2-)
VENV := .venv
BIN := $(VENV)/bin
PACKAGE := $(VENV)/.package
STAMP := $(VENV)/.installed
PAGE := src/perdure/dashboard/static/index.html
PIP := $(BIN)/python -m pip --disable-pip-version-check
# The name of each package as it comes.
NAMES := | awk '/^Collecting/ { sub(/[<>=!~;\[].*/, "", $$2); print "  " $$2; fflush() }'
# Tests prove logic and survive kills on any file system; a directory in memory spares them the disk.
# Power cuts and slow disks are for the campaigns.
ROOMY := $(shell df -Pm /dev/shm 2>/dev/null | awk 'NR == 2 && $$4 > 4000 { print "/dev/shm" }')

.DEFAULT_GOAL := help
.PHONY: help demo test check ui windows docs bench bench-peers bench-growth format

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 16

# The demo needs the package alone: a newcomer waits for seconds, not for every tool.
$(PACKAGE): pyproject.toml
	@python="$(PYTHON)"; \
	if [ -z "$$python" ]; then \
		echo "no Python from 3.11 on with ensurepip was found; name one: make PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "setting up $(VENV) with $$("$$python" --version) (once)"; \
	"$$python" -m venv $(VENV)
	@$(PIP) install --quiet --upgrade "pip>=25.1"
	@echo "installing perdure"
	@set -o pipefail; $(PIP) install --editable '.[ui]' $(NAMES)
	@touch $(PACKAGE)

$(STAMP): $(PACKAGE)
	@echo "installing what the tests and checks need (once, some minutes)"
	@set -o pipefail; $(PIP) install --group dev $(NAMES)
	@touch $(STAMP)

# The page of the dashboard. Without npm the package works without it, and says so.
$(PAGE): ui/package-lock.json ui/build.mjs $(wildcard ui/src/* ui/src/pages/*)
	@if command -v npm >/dev/null; then \
		echo "building the page of the dashboard"; \
		(cd ui && npm ci --silent >/dev/null 2>&1 && npm run --silent build) \
		|| echo "npm could not build the page of the dashboard; the API works without it"; \
	else \
		echo "npm is not there: the page of the dashboard is not built"; \
	fi

ui: $(PAGE) ## build the page of the dashboard (needs npm)

demo: $(PACKAGE) $(PAGE) ## run the shop on SQLite, kill its worker, watch it recover
	@$(BIN)/python -m examples.demo

test: $(STAMP) $(PAGE) ## run every test
	@$(if $(ROOMY),TMPDIR=$(ROOMY)) $(BIN)/python -m pytest --numprocesses 3 --dist worksteal

check: $(STAMP) ## format, lint, types, layers, docs
	@$(BIN)/ruff format --check src tests examples benchmarks
	@$(BIN)/ruff check src tests examples benchmarks
	@for system in linux darwin win32; do $(BIN)/mypy --platform $$system || exit 1; done
	@$(BIN)/pyright
	@$(BIN)/lint-imports
	@$(BIN)/zensical build --config-file mkdocs.yml

windows: $(STAMP) ## run the stores, the engine and the demo on a Python for Windows under Wine
	@PYTHONPATH=tests $(BIN)/python -m campaigns.windows

docs: $(STAMP) ## build the documentation as a site in site/
	@$(BIN)/zensical build --config-file mkdocs.yml

format: $(STAMP) ## format the sources
	@$(BIN)/ruff format src tests examples benchmarks
	@$(BIN)/ruff check --fix --quiet src tests examples benchmarks

bench: $(STAMP) ## measure perdure on its stores, some minutes
	@$(BIN)/python -m benchmarks.run
	@$(BIN)/python -m benchmarks.processes

bench-peers: $(STAMP) ## measure perdure beside other engines, sets them up on first use
	@$(BIN)/python -m benchmarks.run --peers --postgres --chart docs/assets/benchmarks.svg
	@$(BIN)/python -m benchmarks.processes --dbos

bench-growth: $(STAMP) ## measure how costs grow with history, fan-out and stored instances
	@$(BIN)/python -m benchmarks.growth --chart docs/assets/growth.svg
