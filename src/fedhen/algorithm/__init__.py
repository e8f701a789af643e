"""The paper's algorithm: what a device minimises, how the server merges, and the methods made of the two.

Read it in this order: `methods` (a method is an objective and a merge), `objectives`, `merging`, `local_training`
(Alg. 2), `rounds` (Alg. 1, the loop). Then, as needed: `updates` (a device's reply), `sampling` (who is active),
`local_variants` (FedProx, SCAFFOLD, FedDyn), `optimizers` and `server_optimizers`, `holdings` (which weights a device
holds), `failures`.
"""
