# make demo      trains on scikit-learn's digits, then on pages cut into tiles, and writes a report of each
# make test      runs the tests that are neither long nor sweeps: 9 to 17 minutes on two cores
# make test-all  runs every test
# make test-ci   runs all but the sweeps: what must pass before a change lands
# make test-oldest  runs tests with the oldest libraries that pyproject.toml allows, torch and torchvision excepted
# make test-cluster  runs the tests on a real Slurm and on hosts of their own, as root; installs Slurm with apt-get
# make sbom      writes sbom.json: every installed package with its version and license, as CycloneDX
# make audit     looks the installed packages up among known vulnerabilities; its status is 3 where it could not ask
# make test-gpu  runs the tests that need a GPU, and says how many of them ran
# make bench-gpu measures on a GPU, within 8 minutes, and writes benchmarks/results/gpu.json
# make coverage  the same, and which lines no test runs
# make docs      builds the documentation into site/
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python keeps what it compiles, though the environment may say otherwise: else every process compiles all of torch again.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo test test-all test-ci test-oldest test-cluster test-gpu bench-gpu coverage docs sbom audit clean
demo: $(VENV)/installed
	$(BIN)/widefield train recipes/digits.yaml mesh.replicate=2
	$(BIN)/widefield train recipes/page.yaml 'data.options.pages=[48,8]' schedule.length=4ep schedule.warmup=1ep

# Two files of tests at a time, on one thread each; then, by itself, what times signals, waits and whole runs.
PAIRS := OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n 2 --dist loadfile
ALONE := $(BIN)/python -m pytest

test: $(VENV)/installed-test
	$(PAIRS) -m "not alone and not long and not sweep"
	$(ALONE) -m "alone and not long and not sweep"

test-all: $(VENV)/installed-test
	$(PAIRS) -m "not alone"
	$(ALONE) -m "alone"

test-ci: $(VENV)/installed-test
	$(PAIRS) -m "not alone and not sweep"
	$(ALONE) -m "alone and not sweep"

# A second environment that has the old libraries and finds all others in the first.
OLDEST := $(VENV)-oldest
test-oldest: $(VENV)/installed-test
	$(PYTHON) -m venv $(OLDEST)
	$(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))" > $$(ls -d $(OLDEST)/lib/python*/site-packages)/zz_first.pth
	$(BIN)/python tests/oldest_versions.py | xargs $(OLDEST)/bin/python -m pip install --quiet
	OMP_NUM_THREADS=1 $(OLDEST)/bin/python -m pytest $(WITH_OLDEST) -m "not long and not alone" -W ignore::DeprecationWarning

# Old libraries warn of what their newer companions have renamed.  What uses the libraries: image files, recipes, metrics, pages, records, weights.
WITH_OLDEST := tests/image_files tests/tasks tests/losses tests/report tests/training/test_record.py tests/test_config.py \
	tests/test_list.py tests/test_supply_chain.py

# In an environment of their own, so that what they need is not among what they list.
AUDIT := $(VENV)-audit
sbom: $(AUDIT)/installed
	$(AUDIT)/bin/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --output-file sbom.json $(BIN)/python
	@echo "sbom.json lists what is installed in $(VENV)"

audit: $(AUDIT)/installed
	$(AUDIT)/bin/python tests/audit.py $$($(BIN)/python -c "import sysconfig; print(sysconfig.get_path('purelib'))")

$(AUDIT)/installed: $(VENV)/installed
	$(PYTHON) -m venv $(AUDIT)
	$(BIN)/python tests/oldest_versions.py --extra audit | xargs $(AUDIT)/bin/python -m pip install --quiet
	touch $@

# As root, for it makes network namespaces and starts Slurm's daemons in them.  Plain `pytest` leaves this folder out.
test-cluster: $(VENV)/installed-test
	sh tests/cluster/install.sh
	$(ALONE) tests/cluster --durations=0

# In one process, for its ranks share the GPU.  Without a GPU all are skipped, the last lines say so, and the status is 0.
test-gpu: $(VENV)/installed-test
	$(ALONE) -m gpu --durations=10

bench-gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py

coverage: $(VENV)/installed-test
	$(BIN)/python -m pytest --cov --cov-report=term:skip-covered

docs: $(VENV)/installed-docs
	$(BIN)/mkdocs build --strict

$(BIN)/python:
	$(PYTHON) -m venv $(VENV)

$(VENV)/installed: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable .
	touch $@

# In one go, and without compiling modules ahead: of 237 MB of them a test run imports a tenth, and compiles it once.
$(VENV)/installed-test: $(BIN)/python pyproject.toml
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[test]'
	touch $(VENV)/installed $@

$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --editable '.[docs]'
	touch $@

clean:
	rm -rf $(VENV) $(VENV)-oldest $(VENV)-audit site sbom.json
