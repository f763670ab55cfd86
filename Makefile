# One command each for whoever uses the series and whoever changes it; `make help` lists them.
PYTHON ?= $(shell command -v python3.11 || command -v python3)
RELEASE := 0.5.23
R ?= $(RELEASE)
PY := .venv/bin/python
SEAM := .venv/bin/seam
PDLAB := .venv/bin/pdlab
PYTEST := $(PY) -m pytest

.DEFAULT_GOAL := help
.PHONY: help setup tree demo serve test test-seam test-lab test-pair test-release test-revert \
        bench soak documented check matrix coverage lint clean

help:  ## this list
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' $(MAKEFILE_LIST) | expand -t 22

setup:  ## .venv with everything pinned, and the system libraries (once)
	@$(PYTHON) tools/setup.py

tree: setup  ## build/$(R): the release R with the series laid over it
	@$(SEAM) tree build/$(R) --release $(R) --replace

demo: tree  ## stock and patched servers side by side: one table, and build/report/index.html
	@$(PDLAB) compare parity prefix pressure health --tree build/$(RELEASE) \
	    --html build/report --json build/report/result.json

serve: tree  ## the patched pair, until Ctrl-C, with a curl to paste
	@$(PDLAB) up --tree build/$(RELEASE)

test: setup check test-seam  ## everything: seam, 18 releases, unit tests, operators, a real pair
	@$(MAKE) --no-print-directory test-release R=$(RELEASE)
	@$(MAKE) --no-print-directory test-lab test-pair

check: setup  ## the series on all supported releases
	@$(SEAM) check

test-seam: setup  ## seam, the pages and the repository
	@$(PYTEST) test/seam

test-lab: tree  ## the lab and its operators, without servers
	@$(PYTEST) test/lab -m "not servers"

test-pair: tree  ## real servers on two processors
	@$(PYTEST) test/lab -m servers

test-release: setup  ## the registered unit tests on release R, with its own pins (R=0.5.11)
	@$(PY) tools/registered.py run $(R)

test-revert: setup  ## take each patch out in turn: its tests must fail
	@$(PY) tools/registered.py revert $(R)

bench: tree  ## every side-by-side figure, kept in bench/results
	@$(PY) bench/all.py --tree build/$(RELEASE)

soak: tree  ## half an hour: a million steps of the slot pool, mixed traffic, faults, 2000 bodies of any kind
	@PYTEST_TIMEOUT=3600 METADATA_SLOTS_STEPS=1000000 $(PY) tools/registered.py run $(RELEASE) metadata-slots
	@$(PY) bench/all.py soak --tree build/$(RELEASE)
	@PYTEST_TIMEOUT=3600 PDLAB_FUZZ_BODIES=2000 $(PYTEST) test/lab/test_fuzz_servers.py

matrix: setup  ## README.md's releases and patches, anew
	@$(PY) tools/matrix.py

coverage: tree  ## lines of src/ and python/ that the tests run, 90 % and more
	@$(PY) tools/covered.py

documented: tree  ## every command of the pages that no test runs, word for word (hours: soak, bench)
	@$(PY) tools/documented.py run

lint: setup  ## format, lint, types
	@$(PY) -m ruff format --check . && $(PY) -m ruff check . && $(PY) -m mypy

clean:  ## what was built; .venv and the wheel cache stay
	@rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
