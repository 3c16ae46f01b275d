"""The one door to torch.distributed: ranks, mesh, collectives and their ledger."""
