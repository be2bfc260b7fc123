"""Which hook belongs to which module: name of the module -> "module of ours:function".

The function is called with the module just after the module's own code has run, once, and so
before any other module takes names from it.
"""

_FSDP2 = "torch.distributed.fsdp._fully_shard"

TARGETS: dict[str, str] = {
    "torch.autograd": "ddp_audit.hooks.backward:install",
    "torch.optim.optimizer": "ddp_audit.hooks.optimizer:install",
    "torch.utils.data._utils.worker": "ddp_audit.hooks.worker:install",
    "torch.utils.data.dataloader": "ddp_audit.hooks.dataloader:install",
    "torchdata.stateful_dataloader.worker": "ddp_audit.hooks.worker:install",
    "torchdata.stateful_dataloader.stateful_dataloader": "ddp_audit.hooks.dataloader:install_stateful",
    "torchdata.nodes.adapters": "ddp_audit.hooks.nodes:install_adapters",
    "torchdata.nodes.map": "ddp_audit.hooks.nodes:install_map",
    "torchdata.nodes.loader": "ddp_audit.hooks.nodes:install_loader",
    "accelerate.data_loader": "ddp_audit.hooks.holding:install_accelerate",
    "torch.distributed.distributed_c10d": "ddp_audit.hooks.group:install",
    "torch.nn.parallel.distributed": "ddp_audit.hooks.install:parallel_distributed",
    "torch.nn.parallel.data_parallel": "ddp_audit.hooks.install:data_parallel",
    "torch.distributed.fsdp.fully_sharded_data_parallel": "ddp_audit.hooks.install:fsdp1",
    f"{_FSDP2}._fully_shard": "ddp_audit.hooks.install:fsdp2",
    f"{_FSDP2}._fsdp_param_group": "ddp_audit.hooks.install:fsdp2_groups",
    "torch._dynamo.eval_frame": "ddp_audit.hooks.forward:install_compile",
}
