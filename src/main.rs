//! The `plimsoll` program.

use std::process::ExitCode;

fn main() -> ExitCode {
    plimsoll::cli::main()
}
