#!/bin/sh
# Runs protoc from the Python package in protoc.txt, which the Makefile fetches if the system has no protoc.
set -eu
PYTHONPATH="$PROTOC_PACKAGES" exec "${PYTHON:-python3}" -m grpc_tools.protoc "$@"
