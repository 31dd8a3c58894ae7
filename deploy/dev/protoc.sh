#!/bin/sh
# protoc where the system has none: the one of the Python package in protoc.txt, which the Makefile fetches.
set -eu
PYTHONPATH="$PROTOC_PACKAGES" exec "${PYTHON:-python3}" -m grpc_tools.protoc "$@"
