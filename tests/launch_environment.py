"""The recipes' accelerate configurations, and the environment that `accelerate launch` would make of one."""

from pathlib import Path

from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils.launch import prepare_deepspeed_cmd_env, prepare_multi_gpu_env, prepare_simple_launcher_cmd_env

ROOT = Path(__file__).parents[1]
CONFIGS = {path.stem: path for path in sorted((ROOT / "recipes/configs").glob("*.yaml"))}


def environment_of(name):
    """What `accelerate launch` puts into the environment of rank 0, by accelerate's own functions."""
    args = launch_command_parser().parse_args(
        ["--config_file", str(CONFIGS[name]), "--main_process_port", "0", "--main_process_ip", "127.0.0.1", "script.py"]
    )
    args, defaults, _ = _validate_launch_command(args)
    if args.use_deepspeed:
        args.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        environment = prepare_deepspeed_cmd_env(args)[1]
    elif args.multi_gpu or args.use_fsdp:
        environment = prepare_multi_gpu_env(args)
    else:
        environment = prepare_simple_launcher_cmd_env(args)[1]
    if args.num_processes > 1:  # as torchrun adds
        local = args.num_processes // args.num_machines
        environment |= {"WORLD_SIZE": str(args.num_processes), "LOCAL_WORLD_SIZE": str(local), "RANK": "0"}
    return environment
