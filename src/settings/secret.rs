//! Files that hold secrets: read unchanged, with a warning if every user of the machine may read them too. Has no
//! knowledge of the secrets' formats.

use anyhow::Context;
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

/// The permission of users other than the owner and the group. Permission for a group is common, as in secrets mounted
/// for a pod.
const OTHERS_READ: u32 = 0o004;

/// Returns the text of a file with a secret.
pub fn read_text(path: &Path) -> anyhow::Result<String> {
    let unreadable = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(unreadable)?;
    if is_world_readable(&file) {
        // Only a warning: the user that starts this process cannot always change how a secret is mounted.
        let file = path.display().to_string();
        tracing::warn!(file, "every user of this machine can read a secret: `chmod o-rwx` the file");
    }
    let mut text = String::new();
    file.read_to_string(&mut text).with_context(unreadable)?;
    Ok(text)
}

/// Returns whether every user may read the file. No other user can open a pipe such as `<(command)`.
fn is_world_readable(file: &File) -> bool {
    file.metadata().is_ok_and(|found| found.is_file() && found.permissions().mode() & OTHERS_READ != 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::Permissions;

    #[test]
    fn a_secret_that_everybody_can_read_is_noticed() {
        let path = std::env::temp_dir().join(format!("lockstep-secret-{}", std::process::id()));
        std::fs::write(&path, "secret").unwrap();
        for (mode, expect) in [(0o600, false), (0o640, false), (0o440, false), (0o644, true), (0o604, true)] {
            std::fs::set_permissions(&path, Permissions::from_mode(mode)).unwrap();
            assert_eq!(is_world_readable(&File::open(&path).unwrap()), expect, "{mode:o}");
            assert_eq!(read_text(&path).unwrap(), "secret");
        }
        std::fs::remove_file(&path).unwrap();
        let missing = format!("{:#}", read_text(&path).unwrap_err());
        assert!(missing.starts_with(&format!("cannot read {}", path.display())), "{missing}");
        assert!(!is_world_readable(&File::open("/dev/null").unwrap()));
    }
}
