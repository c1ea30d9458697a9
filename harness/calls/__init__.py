"""One call of one implementation: inputs, invocation, tolerance, memory guards."""
