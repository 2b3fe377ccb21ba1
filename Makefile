# Outrider's tasks.  Everything lives in .venv; `make` alone lists what there is.
# ARGS is passed on: make serve ARGS="--verifiers 2", make test ARGS="-k policy".

PYTHON ?= python3
BIN := .venv/bin
ARGS ?=
# Two test processes; files in order, those with engines first.
TWO := -n 2 --no-loadscope-reorder
MAKEFLAGS += --no-print-directory

.DEFAULT_GOAL := help
.PHONY: help setup setup-dev setup-load serve status test test-fast campaign clients vllm-tests versions fuzz lint bench bench-rollouts bench-gateway load chaos
.PHONY: rollout-demo format clean

help: ## list these tasks
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## (.*)/  make \1|\2/' | column -t -s '|' 2>/dev/null \
	  || grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST)

setup: ## install into .venv (does nothing when up to date)
	@$(PYTHON) scripts/setup.py

setup-dev:
	@$(PYTHON) scripts/setup.py --dev

setup-load:
	@$(PYTHON) scripts/setup.py --load

serve: setup ## start a fleet with the built-in demo model and its gateway
	@exec $(BIN)/outrider serve $(ARGS)

status: setup ## show the running fleet
	@exec $(BIN)/outrider status $(ARGS)

test: setup-dev ## run all tests (ten to twenty minutes on two cores)
	@$(BIN)/python -m pytest $(TWO) $(ARGS)

test-fast: setup-dev ## run the tests that start no engine, no Ray and no fleet (under two minutes)
	@$(BIN)/python -m pytest $(TWO) -m "not engine and not campaign" $(ARGS)

campaign: setup-dev ## run what `make test` leaves out, and property tests on new and ten times as many examples
	@$(BIN)/python -m pytest -m "campaign or hypothesis" --hypothesis-profile campaign --timeout 1800 $(ARGS)

clients: setup-dev ## call a fleet with LangChain, LiteLLM and Node's libraries (needs node 20 or newer; ARGS="-k stream")
	@exec $(BIN)/python -m tests.clients $(ARGS)

vllm-tests: setup-dev ## call a fleet as vLLM's own endpoint tests do (ARGS="--sdist vllm-0.32.0.tar.gz -k chat")
	@exec $(BIN)/python -m tests.campaign.vllm_endpoint_tests $(ARGS)

versions: setup-dev ## test with the Triton of torch for CUDA, and with vLLM 0.33 (downloads them: 0.7 GB; half an hour)
	@exec $(BIN)/python -m tests.campaign.other_versions $(ARGS)

fuzz: setup-dev ## call a fleet with what its API document allows, and what not (Schemathesis; ARGS="--seconds 300")
	@exec $(BIN)/python -m tests.fuzz $(ARGS)

lint: setup-dev ## ruff, mypy and the import contracts
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check --quiet . || { echo 'not formatted: make format'; exit 1; }
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-logo

bench: setup-dev ## measure every mode on this machine (ARGS=--quick: under ten minutes)
	@exec $(BIN)/outrider bench $(ARGS)

TAIL := --trace rollouts/tail/train.0.parquet --fixed-responses --verifiers 2
bench-rollouts: setup ## replay a long-tailed batch natively and disaggregated, in turn (20 minutes; writes rollouts/tail/)
	@$(BIN)/outrider trace make stdlib --out rollouts/tail/train.0.parquet --limit 512 --n 4 --max-gen 2000
	@for round in 0 1 2; do \
	  $(BIN)/outrider rollout $(TAIL) --mode native --out rollouts/tail/native-$$round $(ARGS) && \
	  $(BIN)/outrider rollout $(TAIL) --drafters 2 --out rollouts/tail/disaggregated-$$round $(ARGS) || exit; \
	done
	@grep tokens/s rollouts/tail/*/step0/round0/report.md

bench-gateway: setup-dev ## measure what the gateway costs per chunk and request, beside vLLM's own API server (six minutes)
	@exec $(BIN)/python -m tests.gateway_cost $(ARGS)

rollout-demo: setup ## replay 128 responses on two verifiers, natively and disaggregated (some minutes; writes rollouts/)
	@$(BIN)/outrider trace make stdlib --out rollouts/train.0.parquet --limit 128 --max-gen 1500
	@$(BIN)/outrider rollout --trace rollouts/train.0.parquet --fixed-responses --verifiers 2 \
	  --mode native --out rollouts/native $(ARGS)
	@$(BIN)/outrider rollout --trace rollouts/train.0.parquet --fixed-responses --verifiers 2 --drafters 2 \
	  --out rollouts/disaggregated $(ARGS)

load: setup-load ## load a fleet and judge what its clients see (ARGS="--scenario mixed --users 8")
	@exec $(BIN)/locust -f loadtest/locustfile.py --headless --only-summary --loglevel WARNING $(ARGS)

chaos: setup-dev ## kill, stop and restart every part under load (ARGS="--quick --output DIR")
	@exec $(BIN)/python -m tests.chaos $(ARGS)

format: setup-dev ## format the code
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

clean: ## remove .venv, caches and build outputs
	rm -rf .venv build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
