# Two commands do all the set-up on a fresh machine, each by itself: `make demo` and `make test`.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
VLLM := .venvs/vllm-0.32.0
VLLM_V0 := .venvs/vllm-0.8.5

.PHONY: demo test lint clean
