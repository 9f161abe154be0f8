"""What tests share: ranks, scenarios, references, comparison. The tests of these helpers lie beside them."""
