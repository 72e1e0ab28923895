"""Built-in speculators, one module each; `specround.contract.find_speculator` loads them by method name."""
